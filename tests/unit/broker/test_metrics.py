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
    assert sum(count for key, count in samples(metrics).items() if key[0] == name) == 2


def test_final_states_are_exported_before_the_first_reservation(metrics):
    shown = {
        (dict(key[1:])["phase"], dict(key[1:])["reason"])
        for key in samples(metrics)
        if key[0] == "kubelend_reservations_finished_total"
    }
    assert {phase for phase, _ in shown} == set(FINAL)
    assert len(shown) == 7


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
    counted = {dict(key[1:])["reason"]: n for key, n in samples(metrics).items() if FAILURES in key}
    assert {name for name, count in counted.items() if count} == {reason}


FAILURES = "kubelend_placement_failures_total"


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


@pytest.mark.parametrize(
    "name, labels, expected",
    [
        ("http_requests_total", {"route": "reserve", "method": "POST", "code": "201"}, 2),
        ("http_requests_total", {"route": "reserve", "method": "POST", "code": "409"}, 1),
        ("http_request_duration_seconds_count", {"route": "reserve"}, 3),
        ("http_request_duration_seconds_sum", {"route": "reserve"}, 0.007),
        ("http_requests_rejected_total", {"route": "publish", "code": "Forbidden"}, 2),
        ("http_requests_rejected_total", {"route": "publish", "code": "Internal"}, 1),
        ("open_streams", {}, 1),
        ("open_connections", {}, 1),
        ("connections_rejected_total", {"reason": "OutOfFiles"}, 1),
        ("certificate_expiry_timestamp_seconds", {"name": "server"}, NEW_YEAR.timestamp()),
        ("build_info", {"version": kubelend.__version__}, 1),
    ],
)
def test_requests_streams_connections_and_certificates_are_exported(
    metrics, name, labels, expected
):
    count_everything(metrics)
    assert value(metrics, f"kubelend_{name}", **labels) == pytest.approx(expected)


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


GI = 1024**3

AMOUNTS = ("capacity", "allocatable", "reserved", "available")


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


def amounts(ledger, cluster, resource):
    found = fleet_samples(ledger)
    return tuple(found.get((f"cluster_{kind}", cluster, resource)) for kind in AMOUNTS)


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


def test_restored_ledger_exports_the_same():
    runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi,gpu=1")
    runner.reserve("cpu=1,memory=1Gi")
    runner.release(runner.reserve("cpu=1,memory=1Gi"))
    runner.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
    restored = fleet_samples(Ledger.restore(runner.kept()))
    assert restored == {
        key: n for key, n in fleet_samples(runner.ledger).items() if key in restored
    }
    assert {key[:1] for key in restored} == {key[:1] for key in fleet_samples(runner.ledger)}


# -- clusters


FPGA = "example.com/fpga"


@pytest.mark.parametrize(
    "before, wanted, after, expected",
    [
        pytest.param(
            {"offer": "cpu=10,memory=8Gi,gpu=2", "allocated": "cpu=1050m,memory=1Gi"},
            "cpu=500m,memory=256Mi,gpu=1",
            None,
            {
                "cpu": (10, 10, 0.5, 8.45),
                "memory": (8 * GI, 8 * GI, GI / 4, 7 * GI - GI / 4),
                "gpu": (2, 2, 1, 1),
                "storage": (None, None, None, None),
            },
            id="in cores, bytes and devices",
        ),
        pytest.param(
            {"offer": "gpu=1,storage=5Gi"},
            "",
            None,
            {"cpu": (0,) * 4, "memory": (0,) * 4, "storage": (5 * GI, 5 * GI, 0, 5 * GI)},
            id="CPU and memory always",
        ),
        pytest.param(
            {"offer": f"cpu=4,memory=8Gi,{FPGA}=3,hugepages-2Mi=1Gi"},
            f"cpu=1,memory=1Gi,{FPGA}=2",
            None,
            {FPGA: (3, 3, 2, 1), "hugepages-2Mi": (GI, GI, 0, GI)},
            id="extended resources by name",
        ),
        pytest.param(
            {"offer": f"cpu=4,memory=8Gi,{FPGA}=1,gpu=1"},
            f"cpu=1,memory=1Gi,{FPGA}=1,gpu=1",
            "cpu=4,memory=8Gi",
            {FPGA: (0, 0, 1, 0), "gpu": (0, 0, 1, 0)},
            id="withdrawn and still reserved",
        ),
    ],
)
def test_amounts_of_a_cluster_are_exported(before, wanted, after, expected):
    runner = make.CommandRunner()
    runner.advertise("a", **before)
    if wanted:
        runner.reserve(wanted)
    if after:
        runner.advertise("a", after)
    assert {name: amounts(runner.ledger, "a", name) for name in expected} == expected


def test_all_amounts_of_a_cluster_have_the_same_labels():
    runner = make.runner(a="cpu=4,memory=8Gi,example.com/fpga=1", b="cpu=1,gpu=1,storage=1Gi")
    found = fleet_samples(runner.ledger)
    labels = [{key[1:] for key in found if key[0] == f"cluster_{kind}"} for kind in AMOUNTS]
    assert labels == [labels[0]] * 4
    assert len(labels[0]) == 7


def test_overcommitted_cluster_has_nothing_available_and_is_counted():
    runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    runner.reserve("cpu=3,memory=1Gi", pinned="a")
    runner.advertise("a", make.advertisement("a", "cpu=4,memory=8Gi", allocated="cpu=2"))
    assert amounts(runner.ledger, "a", "cpu") == (4, 4, 3, 0)
    assert fleet_samples(runner.ledger)["clusters_overcommitted",] == 1


def test_every_cluster_has_one_state():
    runner = make.runner(**dict.fromkeys("abcd", "cpu=1,memory=1Gi"))
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


def test_states_are_exported_before_the_first_cluster():
    found = fleet_samples(make.ledger())
    assert [found["clusters", state] for state in ("active", "cordoned", "stale")] == [0, 0, 0]
    assert found["clusters_overcommitted",] == found["pending_requests",] == 0


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


def test_removed_cluster_is_not_exported():
    runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    runner.remove("a")
    assert {key[1] for key in fleet_samples(runner.ledger) if key[0].startswith("cluster_")} == {
        "b"
    }


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "line\nbreak", "ümläut", 'all\\"\n'])
def test_cluster_names_are_escaped(name):
    ledger = Ledger.restore(WorkingSet([make.cluster(name), make.cluster("plain")], [], 1))
    assert amounts(ledger, name, "cpu") == (4, 4, 0, 4)
    assert amounts(ledger, "plain", "cpu") == (4, 4, 0, 4)


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
