"""Metrics of the broker: names and labels, counters and histograms, gauges of the ledger."""

import re
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kubelend
import make
from kubelend.broker import metrics as broker_metrics
from kubelend.broker.metrics import Metrics
from kubelend.core import commands
from kubelend.core.decision import NoFit
from kubelend.core.errors import KubelendError
from kubelend.core.events import WorkingSet
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL
from kubelend.wire import routes

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture
def metrics():
    return Metrics()


def text(metrics):
    return metrics.render(metrics.snapshot(make.T0)).decode()


def samples(metrics):
    """Every sample of a scrape by its name and labels; fails on one that comes twice."""
    found = {}
    for family in text_string_to_metric_families(text(metrics)):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def value(metrics, name, /, **labels):
    return samples(metrics).get((name, *sorted(labels.items())))


def buckets(metrics, name, /, **labels):
    """The cumulative counts of a histogram by upper bound."""
    found = {}
    for key, count in samples(metrics).items():
        pairs = dict(key[1:])
        bound = pairs.pop("le", None)
        if key[0] == f"{name}_bucket" and pairs == labels:
            found[float(bound)] = count
    return found


def used_metrics():
    """A broker that has at least one series of every metric."""
    metrics = Metrics()
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    offer, until = make.advertisement("b"), make.T0 + make.HOUR
    desk.run(commands.advertise(desk.ledger, offer, make.STALE_AFTER, desk.now, until))
    metrics.set_ledger(desk.ledger)
    metrics.observe_request("reserve", "POST", 201, 0.002)
    metrics.count_rejected_request("reserve", "Forbidden")
    metrics.connection_rejected("TooManyConnections")
    metrics.set_certificate_expiry("server", make.T0)
    return metrics


# -- names


def test_every_metric_is_scraped_and_nothing_else_is():
    ours = {family for family in scraped(used_metrics()) if family[0].startswith("kubelend_")}
    assert ours == {(f.name, f.kind, f.help) for f in broker_metrics.ALL_METRICS}


def test_process_metrics_are_exported():
    assert "process_resident_memory_bytes" in text(Metrics())


def test_labels_are_the_documented_ones():
    wanted = {family.name: set(family.labels) for family in broker_metrics.ALL_METRICS}
    for name, *pairs in samples(used_metrics()):
        if name.startswith("kubelend_"):
            assert {label for label, _ in pairs} - {"le"} == wanted[family_of(name)], name


@pytest.mark.parametrize("family", broker_metrics.ALL_METRICS, ids=lambda family: family.name)
def test_names_follow_the_conventions(family):
    assert re.fullmatch(r"kubelend_[a-z_]+[a-z]", family.name)
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert bool(family.buckets) == (family.kind == "histogram")
    assert list(family.buckets) == sorted(set(family.buckets))
    assert not set(family.labels) & {"le", "quantile", "job", "instance"}
    assert re.fullmatch(r"[A-Z1][^\n\\|]*[^.\s]|.*\.\.\.", family.help)


def test_documentation_has_the_table_of_the_code():
    documented = DOCS.read_text()
    assert broker_metrics.metrics_table() in documented
    rows = re.findall(r"^\| `(kubelend_(?!agent)\w+)` \|", documented, re.MULTILINE)
    assert rows == [family.name for family in broker_metrics.ALL_METRICS]


def test_documentation_names_only_existing_metrics():
    used = {family_of(name) for name in re.findall(r"kubelend_(?!agent)\w+", DOCS.read_text())}
    assert used - {"kubelend_cluster_"} == {family.name for family in broker_metrics.ALL_METRICS}


# -- the service


@pytest.mark.parametrize("outcome", ["placed", "queued", "rejected"])
def test_placement_is_counted_by_outcome(metrics, outcome):
    metrics.observe_placement(outcome, 0.00012)
    counts = buckets(metrics, "kubelend_placement_duration_seconds", outcome=outcome)
    assert (counts[0.0001], counts[0.0002], counts[float("inf")]) == (0, 1, 1)
    name = "kubelend_placement_duration_seconds"
    assert value(metrics, f"{name}_sum", outcome=outcome) == pytest.approx(0.00012)
    assert value(metrics, f"{name}_count", outcome=outcome) == 1


def test_outcomes_are_exported_before_the_first_placement(metrics):
    name = "kubelend_placement_duration_seconds_count"
    assert [value(metrics, name, outcome=o) for o in ("placed", "queued", "rejected")] == [0, 0, 0]


@pytest.mark.parametrize(
    "seconds, bound",
    [(0.0, 0.00002), (0.00002, 0.00002), (0.000021, 0.00005), (0.1, 0.1), (7.0, float("inf"))],
    ids=["zero", "on a bound", "above a bound", "on the last bound", "above all"],
)
def test_observation_is_counted_in_its_bucket(metrics, seconds, bound):
    metrics.observe_placement("placed", seconds)
    counts = buckets(metrics, "kubelend_placement_duration_seconds", outcome="placed")
    assert min(upper for upper, count in counts.items() if count) == bound


def test_commit_has_a_duration_and_a_size(metrics):
    desk = make.desk(a="cpu=4,memory=8Gi")
    metrics.observe_commit(desk.changes * 5, 0.003)
    assert value(metrics, "kubelend_store_commit_duration_seconds_sum") == pytest.approx(0.003)
    counts = buckets(metrics, "kubelend_store_commit_changes")
    assert (counts[4], counts[8]) == (0, 1)
    assert value(metrics, "kubelend_store_commit_changes_sum") == 5


def test_finished_reservation_is_counted_once(metrics):
    desk = make.desk(a="cpu=4,memory=8Gi")
    released = desk.reserve("cpu=1,memory=1Gi")
    desk.activate(released)
    desk.release(released)
    desk.release(released)
    expired = desk.reserve("cpu=1,memory=1Gi")
    desk.pass_time(2 * make.HOUR)
    desk.expire(retention=make.MINUTE)
    desk.pass_time(make.HOUR)
    desk.expire(retention=make.MINUTE)
    assert expired not in desk.ledger.reservations
    metrics.observe_commit(desk.changes, 0.001)
    name = "kubelend_reservations_finished_total"
    assert value(metrics, name, phase="Released", reason="ReleasedByRequester") == 1
    assert value(metrics, name, phase="Released", reason="Expired") == 1
    assert value(metrics, name, phase="Failed", reason="ProviderRefused") == 0
    assert sum(count for key, count in samples(metrics).items() if key[0] == name) == 2


def test_final_states_are_exported_before_the_first_reservation(metrics):
    shown = {
        (dict(key[1:])["phase"], dict(key[1:])["reason"])
        for key in samples(metrics)
        if key[0] == "kubelend_reservations_finished_total"
    }
    assert {phase for phase, _ in shown} == set(FINAL)
    assert len(shown) == 7


def explanation(desk, wanted):
    answer = desk.ask(wanted)
    assert isinstance(answer, NoFit)
    return answer.explanation


def test_placement_failure_is_counted_by_its_most_frequent_reason(metrics):
    desk = make.desk(a="cpu=1,memory=8Gi", b="cpu=1,memory=8Gi", c="cpu=8,memory=8Gi")
    desk.cordon("c")
    metrics.count_placement_failure(explanation(desk, "cpu=4,memory=1Gi"))
    assert value(metrics, "kubelend_placement_failures_total", reason="InsufficientCPU") == 1
    assert value(metrics, "kubelend_placement_failures_total", reason="Cordoned") == 0


def test_equally_frequent_reasons_are_ordered_by_name(metrics):
    desk = make.desk(a="cpu=1,memory=8Gi", c="cpu=8,memory=8Gi")
    desk.cordon("c")
    why = explanation(desk, "cpu=4,memory=1Gi")
    assert str(why) == "0/2 clusters fit: 1 Cordoned, 1 InsufficientCPU"
    metrics.count_placement_failure(why)
    assert value(metrics, "kubelend_placement_failures_total", reason="Cordoned") == 1


def test_placement_failure_without_clusters_has_its_own_reason(metrics):
    metrics.count_placement_failure(explanation(make.desk(), "cpu=1"))
    assert value(metrics, "kubelend_placement_failures_total", reason="NoClusters") == 1


def test_store_is_down_until_it_is_up(metrics):
    assert value(metrics, "kubelend_store_up") == 0
    metrics.set_store_up(up=True)
    assert value(metrics, "kubelend_store_up") == 1
    metrics.set_store_up(up=False)
    assert value(metrics, "kubelend_store_up") == 0


# -- the API


def test_request_is_counted_by_route_method_and_status(metrics):
    metrics.observe_request("reserve", "POST", 201, 0.002)
    metrics.observe_request("reserve", "POST", 201, 0.004)
    metrics.observe_request("reserve", "POST", 409, 0.001)
    name = "kubelend_http_requests_total"
    assert value(metrics, name, route="reserve", method="POST", code="201") == 2
    assert value(metrics, name, route="reserve", method="POST", code="409") == 1
    seconds = "kubelend_http_request_duration_seconds"
    assert value(metrics, f"{seconds}_count", route="reserve") == 3
    assert value(metrics, f"{seconds}_sum", route="reserve") == pytest.approx(0.007)


def test_callers_cannot_create_series(metrics):
    for number in range(50):
        metrics.observe_request(f"/nowhere/{number}", f"VERB{number}", 404, 0.001)
        metrics.count_rejected_request(f"/nowhere/{number}", "NotFound")
    name = "kubelend_http_requests_total"
    assert value(metrics, name, route="unknown", method="unknown", code="404") == 50
    assert (
        value(metrics, "kubelend_http_requests_rejected_total", route="unknown", code="NotFound")
        == 50
    )
    assert "nowhere" not in text(metrics)
    assert "VERB" not in text(metrics)


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda route: route.name)
def test_every_route_has_its_label(metrics, route):
    metrics.observe_request(route.name, route.method, 200, 0.001)
    labels = {"route": route.name, "method": route.method, "code": "200"}
    assert value(metrics, "kubelend_http_requests_total", **labels) == 1


def test_rejected_request_is_counted_by_error_code(metrics):
    metrics.count_rejected_request("publish", "Forbidden")
    metrics.count_rejected_request("publish", "Forbidden")
    metrics.count_rejected_request("publish", KubelendError.code)
    name = "kubelend_http_requests_rejected_total"
    assert value(metrics, name, route="publish", code="Forbidden") == 2
    assert value(metrics, name, route="publish", code="Internal") == 1


def test_open_streams_are_counted(metrics):
    metrics.stream_opened()
    metrics.stream_opened()
    metrics.stream_closed()
    assert value(metrics, "kubelend_open_streams") == 1


def test_open_and_rejected_connections_are_counted(metrics):
    metrics.connection_opened()
    metrics.connection_opened()
    metrics.connection_closed()
    metrics.connection_rejected("OutOfFiles")
    assert value(metrics, "kubelend_open_connections") == 1
    assert value(metrics, "kubelend_connections_rejected_total", reason="OutOfFiles") == 1


def test_certificate_expiry_is_exported(metrics):
    metrics.set_certificate_expiry("server", datetime(2031, 1, 1, tzinfo=UTC))
    metrics.set_certificate_expiry("server", datetime(2032, 1, 1, tzinfo=UTC))
    name = "kubelend_certificate_expiry_timestamp_seconds"
    assert value(metrics, name, name="server") == datetime(2032, 1, 1, tzinfo=UTC).timestamp()


def test_build_info_has_the_version(metrics):
    assert value(metrics, "kubelend_build_info", version=kubelend.__version__) == 1


def test_two_brokers_in_one_process_are_counted_apart():
    one, other = Metrics(), Metrics()
    one.observe_placement("placed", 0.001)
    assert value(other, "kubelend_placement_duration_seconds_count", outcome="placed") == 0


def test_counting_continues_while_another_thread_renders(metrics):
    texts, done = [], threading.Event()

    def scrape():
        snapshot = metrics.snapshot(make.T0)
        while not done.is_set():
            texts.append(metrics.render(snapshot).decode())

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        for number in range(3000):
            metrics.observe_request(
                routes.ROUTES[number % len(routes.ROUTES)].name, "GET", number, 0.001
            )
    finally:
        done.set()
        scraper.join()
    assert texts
    total = sum(c for k, c in samples(metrics).items() if k[0] == "kubelend_http_requests_total")
    assert total == 3000


def scraped(metrics):
    """Name, kind and help of every family, as written and not as the parser makes it."""
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text(metrics), re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (.*)$", text(metrics), re.MULTILINE))
    assert helps.keys() == kinds.keys()
    with_samples = {family_of(key[0]) for key in samples(metrics)}
    return {(name, kinds[name], helps[name]) for name in helps if name in with_samples}


def family_of(sample):
    base = re.sub(r"_(bucket|sum|count)$", "", sample)
    return base if any(family.name == base for family in broker_metrics.ALL_METRICS) else sample


# -- gauges of the ledger


GI = 1024**3


AMOUNTS = ("capacity", "allocatable", "reserved", "available")


def snapshot_of(ledger, now):
    ours = broker_metrics.Metrics()
    ours.set_ledger(ledger)
    return ours.snapshot(now)


def fleet_samples(ledger, now=make.T0):
    """Every sample by name and labels; fails on a family or a sample that comes twice."""
    found = {}
    text = b"".join(broker_metrics.fleet_metrics_text(snapshot_of(ledger, now))).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type == "gauge"
        for sample in family.samples:
            key = (sample.name.removeprefix("kubelend_"), *sample.labels.values())
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def amounts(ledger, cluster, resource):
    found = fleet_samples(ledger)
    return tuple(found.get((f"cluster_{kind}", cluster, resource)) for kind in AMOUNTS)


# -- reservations


def test_reservations_are_exported_by_phase_and_reason():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    desk.activate(desk.reserve("cpu=1,memory=1Gi"))
    desk.release(desk.reserve("cpu=1,memory=1Gi"))
    desk.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    found = fleet_samples(desk.ledger)
    assert {key[1:]: n for key, n in found.items() if key[0] == "reservations" and n} == {
        ("Reserved", "Locked"): 1,
        ("Active", "InUse"): 1,
        ("Released", "ReleasedByRequester"): 1,
        ("Pending", "Waiting"): 1,
    }
    assert found["pending_requests",] == 1


def test_archived_reservation_is_not_exported():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.release(desk.reserve("cpu=1,memory=1Gi"))
    desk.pass_time(2 * make.RETENTION)
    desk.expire()
    assert fleet_samples(desk.ledger)["reservations", "Released", "ReleasedByRequester"] == 0


def test_restored_ledger_exports_the_same():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi,gpu=1")
    desk.reserve("cpu=1,memory=1Gi")
    desk.release(desk.reserve("cpu=1,memory=1Gi"))
    desk.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
    restored = fleet_samples(Ledger.restore(desk.kept()))
    assert restored == {key: n for key, n in fleet_samples(desk.ledger).items() if key in restored}
    assert {key[:1] for key in restored} == {key[:1] for key in fleet_samples(desk.ledger)}


# -- clusters


def test_amounts_are_in_cores_bytes_and_devices():
    desk = make.desk(
        a=make.advertisement("a", "cpu=10,memory=8Gi,gpu=2", allocated="cpu=1050m,memory=1Gi")
    )
    desk.reserve("cpu=500m,memory=256Mi,gpu=1")
    assert amounts(desk.ledger, "a", "cpu") == (10, 10, 0.5, 8.45)
    assert amounts(desk.ledger, "a", "memory") == (8 * GI, 8 * GI, GI / 4, 7 * GI - GI / 4)
    assert amounts(desk.ledger, "a", "gpu") == (2, 2, 1, 1)
    assert amounts(desk.ledger, "a", "storage") == (None, None, None, None)


def test_cpu_and_memory_are_always_exported():
    desk = make.desk(a="gpu=1,storage=5Gi")
    assert amounts(desk.ledger, "a", "cpu") == (0, 0, 0, 0)
    assert amounts(desk.ledger, "a", "memory") == (0, 0, 0, 0)
    assert amounts(desk.ledger, "a", "storage") == (5 * GI, 5 * GI, 0, 5 * GI)


def test_extended_resources_are_exported_by_name():
    desk = make.desk(a="cpu=4,memory=8Gi,example.com/fpga=3,hugepages-2Mi=1Gi")
    desk.reserve("cpu=1,memory=1Gi,example.com/fpga=2")
    assert amounts(desk.ledger, "a", "example.com/fpga") == (3, 3, 2, 1)
    assert amounts(desk.ledger, "a", "hugepages-2Mi") == (GI, GI, 0, GI)


def test_withdrawn_resource_is_exported_while_reserved():
    desk = make.desk(a="cpu=4,memory=8Gi,example.com/fpga=1,gpu=1")
    desk.reserve("cpu=1,memory=1Gi,example.com/fpga=1,gpu=1")
    desk.advertise("a", "cpu=4,memory=8Gi")
    assert amounts(desk.ledger, "a", "example.com/fpga") == (0, 0, 1, 0)
    assert amounts(desk.ledger, "a", "gpu") == (0, 0, 1, 0)


def test_all_amounts_of_a_cluster_have_the_same_labels():
    desk = make.desk(a="cpu=4,memory=8Gi,example.com/fpga=1", b="cpu=1,gpu=1,storage=1Gi")
    found = fleet_samples(desk.ledger)
    labels = [{key[1:] for key in found if key[0] == f"cluster_{kind}"} for kind in AMOUNTS]
    assert labels == [labels[0]] * 4
    assert len(labels[0]) == 7


def test_overcommitted_cluster_has_nothing_available_and_is_counted():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi", pinned="a")
    desk.advertise("a", make.advertisement("a", "cpu=4,memory=8Gi", allocated="cpu=2"))
    assert amounts(desk.ledger, "a", "cpu") == (4, 4, 3, 0)
    assert fleet_samples(desk.ledger)["clusters_overcommitted",] == 1


def test_every_cluster_has_one_state():
    desk = make.desk(**dict.fromkeys("abcd", "cpu=1,memory=1Gi"))
    desk.cordon("a")
    desk.cordon("b")
    desk.pass_time(make.STALE_AFTER)
    desk.advertise("b", "cpu=1,memory=1Gi")
    desk.advertise("c", "cpu=1,memory=1Gi")
    found = fleet_samples(desk.ledger, desk.now)
    states = {key[1]: n for key, n in found.items() if key[0] == "clusters"}
    assert states == {"active": 1, "cordoned": 1, "stale": 2}
    active = {key[1]: n for key, n in found.items() if key[0] == "cluster_active"}
    assert active == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_states_are_exported_before_the_first_cluster():
    found = fleet_samples(make.ledger())
    assert [found["clusters", state] for state in ("active", "cordoned", "stale")] == [0, 0, 0]
    assert found["clusters_overcommitted",] == 0
    assert found["pending_requests",] == 0


def test_removed_cluster_is_not_exported():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    desk.remove("a")
    assert {key[1] for key in fleet_samples(desk.ledger) if key[0].startswith("cluster_")} == {"b"}


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "line\nbreak", "ümläut", 'all\\"\n'])
def test_cluster_names_are_escaped(name):
    ledger = Ledger.restore(WorkingSet([make.cluster(name), make.cluster("plain")], [], 1))
    assert amounts(ledger, name, "cpu") == (4, 4, 0, 4)
    assert amounts(ledger, "plain", "cpu") == (4, 4, 0, 4)


# -- the snapshot


def test_snapshot_is_immutable():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    snapshot = snapshot_of(desk.ledger, desk.now)
    before = broker_metrics.fleet_metrics_text(snapshot)
    desk.reserve("cpu=1,memory=1Gi")
    desk.advertise("b", "cpu=4,memory=8Gi")
    desk.remove("b")
    assert broker_metrics.fleet_metrics_text(snapshot) == before
    assert broker_metrics.fleet_metrics_text(snapshot_of(desk.ledger, desk.now)) != before


def test_ten_thousand_clusters_are_exported():
    offer = make.resources("cpu=64,memory=256Gi,gpu=4")
    known = [make.cluster(f"cluster-{number:05}", offer) for number in range(10_000)]
    found = fleet_samples(Ledger.restore(WorkingSet(known, [], 1)))
    assert sum(key[0] == "cluster_available" for key in found) == 30_000
    assert found["clusters", "active"] == 10_000
    assert found["cluster_available", "cluster-09999", "cpu"] == 64
    assert found["cluster_active", "cluster-00000"] == 1
