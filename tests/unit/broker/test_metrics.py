"""BrokerMetrics of the broker: names and labels, counters and histograms, gauges of the ledger."""

import re
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kubelend
import make
from kubelend.broker import metrics as broker_metrics
from kubelend.broker.metrics import BrokerMetrics
from kubelend.core import commands
from kubelend.core.errors import KubelendError
from kubelend.core.events import StoreLag, WorkingSet
from kubelend.core.explanations import NoFit
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL
from kubelend.core.models import Quota
from kubelend.wire import routes

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture
def metrics():
    return BrokerMetrics()


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
    metrics = BrokerMetrics()
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.allot("r", Quota({"cpu": 4000}, budget=1))
    runner.reserve("cpu=1,memory=1Gi")
    runner.reserve("cpu=99,memory=1Gi", requester="s", wait=make.HOUR)
    offer, until = make.advertisement("b"), make.T0 + make.HOUR
    runner.run(commands.advertise(runner.ledger, offer, make.STALE_AFTER, runner.now, until))
    metrics.set_ledger(runner.ledger)
    metrics.observe_request("reserve", "POST", 201, 0.002)
    metrics.count_rejected_request("reserve", "Forbidden")
    metrics.watch_store(StoreLag)
    metrics.connection_rejected("TooManyConnections")
    metrics.set_certificate_expiry("server", make.T0)
    return metrics


# -- names


def test_every_metric_is_scraped_and_nothing_else_is():
    ours = {family for family in scraped(used_metrics()) if family[0].startswith("kubelend_")}
    assert ours == {(f.name, f.kind, f.help) for f in broker_metrics.ALL_METRICS}


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
    for family in broker_metrics.ALL_METRICS:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        assert f"| `{family.name}` | {family.kind} | {labels} | {family.help} |\n" in documented
    rows = re.findall(r"^\| `(kubelend_(?!agent)\w+)` \|", documented, re.MULTILINE)
    assert rows == [family.name for family in broker_metrics.ALL_METRICS]


def test_documentation_names_only_existing_metrics():
    used = {family_of(name) for name in re.findall(r"kubelend_(?!agent)\w+", DOCS.read_text())}
    assert used - {"kubelend_cluster_", "kubelend_requester_"} == {
        family.name for family in broker_metrics.ALL_METRICS
    }


# -- the service


def test_outcomes_of_placements_are_counted_apart_and_exported_before_the_first(metrics):
    metrics.observe_placement("queued", 0.00012)
    other, name = BrokerMetrics(), "kubelend_placement_duration_seconds"
    for outcome, count in (("placed", 0), ("queued", 1), ("rejected", 0)):
        assert value(metrics, f"{name}_count", outcome=outcome) == count
        assert value(metrics, f"{name}_sum", outcome=outcome) == pytest.approx(0.00012 * count)
        assert value(other, f"{name}_count", outcome=outcome) == 0, "of another broker"


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
    runner = make.runner(a="cpu=4,memory=8Gi")
    metrics.observe_commit(runner.changes * 5, 0.003)
    assert value(metrics, "kubelend_store_commit_duration_seconds_sum") == pytest.approx(0.003)
    counts = buckets(metrics, "kubelend_store_commit_changes")
    assert (counts[4], counts[8]) == (0, 1)
    assert value(metrics, "kubelend_store_commit_changes_sum") == 5


def test_finished_reservation_is_counted_once(metrics):
    runner = make.runner(a="cpu=4,memory=8Gi")
    released = runner.reserve("cpu=1,memory=1Gi")
    runner.activate(released)
    runner.release(released)
    runner.release(released)
    expired = runner.reserve("cpu=1,memory=1Gi")
    runner.pass_time(2 * make.HOUR)
    runner.expire(retention=make.MINUTE)
    runner.pass_time(make.HOUR)
    runner.expire(retention=make.MINUTE)
    assert expired not in runner.ledger.reservations
    metrics.observe_commit(runner.changes, 0.001)
    name = "kubelend_reservations_finished_total"
    assert value(metrics, name, phase="Released", reason="ReleasedByRequester") == 1
    assert value(metrics, name, phase="Released", reason="Expired") == 1
    assert value(metrics, name, phase="Failed", reason="ProviderRefused") == 0
    shown = {key[1:]: count for key, count in samples(metrics).items() if key[0] == name}
    assert (len(shown), sum(shown.values())) == (7, 2), "also what has not happened"
    assert {dict(labels)["phase"] for labels in shown} == set(FINAL)


@pytest.mark.parametrize(
    "clusters, reason",
    [("abc", "InsufficientCPU"), ("ac", "Cordoned"), ("", "NoClusters")],
    ids=["most frequent", "first by name", "no clusters"],
)
def test_placement_failure_is_counted_by_its_most_frequent_reason(metrics, clusters, reason):
    offers = {"a": "cpu=1,memory=8Gi", "b": "cpu=1,memory=8Gi", "c": "cpu=8,memory=8Gi"}
    runner = make.runner(**{name: offers[name] for name in clusters})
    if clusters:
        runner.cordon("c")
    answer = runner.ask("cpu=4,memory=1Gi")
    assert isinstance(answer, NoFit)
    metrics.count_placement_failure(answer.explanation)
    name = "kubelend_placement_failures_total"
    assert [key[1:] for key, n in samples(metrics).items() if n and key[0] == name] == [
        (("reason", reason),)
    ]


# -- the API


NEW_YEAR = datetime(2032, 1, 1, tzinfo=UTC)


def count_everything(metrics):
    metrics.observe_request("reserve", "POST", 201, 0.002)
    metrics.observe_request("reserve", "POST", 201, 0.004)
    metrics.observe_request("reserve", "POST", 409, 0.001)
    for code in ("Forbidden", "Forbidden", KubelendError.code):
        metrics.count_rejected_request("publish", code)
    for count in (metrics.stream_opened, metrics.connection_opened):
        count()
        count()
    metrics.stream_closed()
    metrics.connection_closed()
    metrics.connection_rejected("OutOfFiles")
    metrics.set_certificate_expiry("server", NEW_YEAR - make.HOUR)
    metrics.set_certificate_expiry("server", NEW_YEAR)


def test_requests_streams_connections_and_certificates_are_exported(metrics):
    count_everything(metrics)
    reserved = {"route": "reserve", "method": "POST"}
    for name, labels, expected in (
        ("http_requests_total", {**reserved, "code": "201"}, 2),
        ("http_requests_total", {**reserved, "code": "409"}, 1),
        ("http_request_duration_seconds_count", {"route": "reserve"}, 3),
        ("http_request_duration_seconds_sum", {"route": "reserve"}, 0.007),
        ("http_requests_rejected_total", {"route": "publish", "code": "Forbidden"}, 2),
        ("http_requests_rejected_total", {"route": "publish", "code": "Internal"}, 1),
        ("open_streams", {}, 1),
        ("open_connections", {}, 1),
        ("connections_rejected_total", {"reason": "OutOfFiles"}, 1),
        ("certificate_expiry_timestamp_seconds", {"name": "server"}, NEW_YEAR.timestamp()),
        ("build_info", {"version": kubelend.__version__}, 1),
    ):
        assert value(metrics, f"kubelend_{name}", **labels) == pytest.approx(expected), name


def test_every_route_has_its_label(metrics):
    for route in routes.ROUTES:
        metrics.observe_request(route.name, route.method, 200, 0.001)
    counted = samples(metrics)
    for route in routes.ROUTES:
        labels = {"route": route.name, "method": route.method, "code": "200"}
        assert counted["kubelend_http_requests_total", *sorted(labels.items())] == 1


def test_store_is_down_until_it_is_up(metrics):
    assert value(metrics, "kubelend_store_up") == 0
    for up in (True, False):
        metrics.set_store_up(up=up)
        assert value(metrics, "kubelend_store_up") == up


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


def snapshot_of(ledger, now):
    ours = broker_metrics.BrokerMetrics()
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


# -- reservations


def test_reservations_are_exported_by_phase_and_reason():
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.reserve("cpu=1,memory=1Gi")
    runner.activate(runner.reserve("cpu=1,memory=1Gi"))
    runner.release(runner.reserve("cpu=1,memory=1Gi"))
    runner.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    found = fleet_samples(runner.ledger)
    assert {key[1:]: n for key, n in found.items() if key[0] == "reservations" and n} == {
        ("Reserved", "Locked"): 1,
        ("Active", "InUse"): 1,
        ("Released", "ReleasedByRequester"): 1,
        ("Pending", "Waiting"): 1,
    }
    assert found["pending_requests",] == 1


# -- clusters


GI = 1024**3
FPGA, HUGE = "example.com/fpga", "hugepages-2Mi"
KINDS = ("capacity", "allocatable", "reserved", "available")


def test_amounts_of_a_cluster_are_exported_in_cores_bytes_and_devices():
    """Those of CPU and memory always, and what was withdrawn while it is reserved."""
    runner = make.CommandRunner()
    runner.advertise("a", "cpu=10,memory=8Gi,gpu=2", allocated="cpu=1050m,memory=1Gi")
    runner.reserve("cpu=500m,memory=256Mi,gpu=1", pinned="a")
    runner.advertise("b", f"storage=5Gi,{FPGA}=3,{HUGE}=1Gi,gpu=1")
    runner.reserve(f"{FPGA}=2,gpu=1", pinned="b")
    runner.advertise("b", f"storage=5Gi,{HUGE}=1Gi")
    found = fleet_samples(runner.ledger)
    amounts = [{key[1:]: n for key, n in found.items() if key[0] == f"cluster_{k}"} for k in KINDS]
    assert {key: tuple(each.get(key) for each in amounts) for key in amounts[0]} == {
        ("a", "cpu"): (10, 10, 0.5, 8.45),
        ("a", "memory"): (8 * GI, 8 * GI, GI / 4, 7 * GI - GI / 4),
        ("a", "gpu"): (2, 2, 1, 1),
        ("b", "cpu"): (0, 0, 0, 0),
        ("b", "memory"): (0, 0, 0, 0),
        ("b", "storage"): (5 * GI, 5 * GI, 0, 5 * GI),
        ("b", "gpu"): (0, 0, 1, 0),
        ("b", FPGA): (0, 0, 2, 0),
        ("b", HUGE): (GI, GI, 0, GI),
    }
    assert all(each.keys() == amounts[0].keys() for each in amounts)
    assert found["clusters_overcommitted",] == 1


def test_every_cluster_has_one_state_and_each_state_is_exported():
    empty = fleet_samples(make.ledger())
    assert [empty["clusters", state] for state in ("active", "cordoned", "stale")] == [0, 0, 0]
    assert empty["clusters_overcommitted",] == empty["pending_requests",] == 0
    runner = make.runner(**dict.fromkeys("abcde", "cpu=1,memory=1Gi"))
    runner.remove("e")
    runner.cordon("a")
    runner.cordon("b")
    runner.pass_time(make.STALE_AFTER)
    runner.advertise("b", "cpu=1,memory=1Gi")
    runner.advertise("c", "cpu=1,memory=1Gi")
    found = fleet_samples(runner.ledger, runner.now)
    states = {key[1]: n for key, n in found.items() if key[0] == "clusters"}
    assert states == {"active": 1, "cordoned": 1, "stale": 2}
    active = {key[1]: n for key, n in found.items() if key[0] == "cluster_active"}
    assert active == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_only_what_can_be_reserved_now_is_available():
    runner = make.runner(**dict.fromkeys("abc", "cpu=4,memory=8Gi"))
    runner.cordon("a", "revoked: stolen")
    runner.pass_time(make.STALE_AFTER)
    runner.advertise("a", "cpu=4,memory=8Gi")
    runner.advertise("b", "cpu=4,memory=8Gi")
    found = fleet_samples(runner.ledger, runner.now)
    assert [found["cluster_available", name, "cpu"] for name in "abc"] == [0, 4, 0]
    at = "cluster_last_advertisement_timestamp_seconds"
    assert [found[at, name] for name in "bc"] == [runner.now.timestamp(), make.T0.timestamp()]


def test_usage_and_limits_of_requesters_are_exported():
    prices = make.price_list("USD", cpu="1", memory="0", gpu="0")
    runner = make.runner(a=make.advertisement("a", "cpu=4,memory=8Gi,gpu=1", prices=prices))
    runner.allot("q", Quota({"cpu": 3000, "gpu": 1}, reservations=5, budget=4 * 10**9))
    runner.reserve("cpu=1500m,memory=1Gi,gpu=1", requester="q")
    runner.release(runner.reserve("cpu=1,memory=1Gi", requester="q"))
    runner.reserve("cpu=4,memory=1Gi", requester='s"', wait=make.HOUR)
    found = fleet_samples(runner.ledger)
    ours = {key[0].removeprefix("requester_"): key for key in found if "requester_" in key[0]}
    assert ours.keys() == {"reserved", "pending_requests", "quota", "spent_today", "daily_budget"}
    assert {key[1:]: n for key, n in found.items() if key[0] == "requester_reserved"} == {
        ("q", "cpu"): 1.5,
        ("q", "memory"): GI,
        ("q", "gpu"): 1,
    }
    assert {key[1:]: n for key, n in found.items() if key[0] == "requester_quota"} == {
        ("q", "cpu"): 3,
        ("q", "gpu"): 1,
        ("q", "reservations"): 5,
    }
    assert found["requester_pending_requests", 's"'] == 1
    assert found["requester_daily_budget", "q", "USD"] == 4
    assert (
        found["requester_spent_today", "q", "USD"] == 1.5
    )  # for the whole hour, from its beginning


def test_cluster_names_are_escaped():
    names = ["plain", 'quo"te', "back\\slash", "line\nbreak", "ümläut", 'all\\"\n']
    ledger = Ledger.restore(WorkingSet([make.cluster(name) for name in names], [], 1))
    found = fleet_samples(ledger)
    assert [found["cluster_available", name, "cpu"] for name in names] == [4] * len(names)


# -- the snapshot


def test_snapshot_is_immutable():
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.reserve("cpu=1,memory=1Gi")
    snapshot = snapshot_of(runner.ledger, runner.now)
    before = broker_metrics.fleet_metrics_text(snapshot)
    runner.reserve("cpu=1,memory=1Gi")
    runner.advertise("b", "cpu=4,memory=8Gi")
    runner.remove("b")
    assert broker_metrics.fleet_metrics_text(snapshot) == before
    assert broker_metrics.fleet_metrics_text(snapshot_of(runner.ledger, runner.now)) != before
