"""What the service and the API report shows in the text that Prometheus reads, and in the documentation."""

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


def well_used():
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
    ours = {family for family in scraped(well_used()) if family[0].startswith("kubelend_")}
    assert ours == {(f.name, f.kind, f.help) for f in broker_metrics.ALL_METRICS}


def test_the_process_itself_is_measured_too():
    assert "process_resident_memory_bytes" in text(Metrics())


def test_labels_are_the_documented_ones():
    wanted = {family.name: set(family.labels) for family in broker_metrics.ALL_METRICS}
    for name, *pairs in samples(well_used()):
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


def test_the_documentation_has_the_table_of_the_code():
    documented = DOCS.read_text()
    assert broker_metrics.metrics_table() in documented
    rows = re.findall(r"^\| `(kubelend_(?!agent)\w+)` \|", documented, re.MULTILINE)
    assert rows == [family.name for family in broker_metrics.ALL_METRICS]


def test_the_documentation_uses_no_metric_that_does_not_exist():
    used = {family_of(name) for name in re.findall(r"kubelend_(?!agent)\w+", DOCS.read_text())}
    assert used - {"kubelend_cluster_"} == {family.name for family in broker_metrics.ALL_METRICS}


# -- the service


@pytest.mark.parametrize("outcome", ["placed", "queued", "rejected"])
def test_a_decision_counts_under_its_outcome(metrics, outcome):
    metrics.observe_placement(outcome, 0.00012)
    counts = buckets(metrics, "kubelend_placement_duration_seconds", outcome=outcome)
    assert (counts[0.0001], counts[0.0002], counts[float("inf")]) == (0, 1, 1)
    name = "kubelend_placement_duration_seconds"
    assert value(metrics, f"{name}_sum", outcome=outcome) == pytest.approx(0.00012)
    assert value(metrics, f"{name}_count", outcome=outcome) == 1


def test_outcomes_show_before_the_first_decision(metrics):
    name = "kubelend_placement_duration_seconds_count"
    assert [value(metrics, name, outcome=o) for o in ("placed", "queued", "rejected")] == [0, 0, 0]


@pytest.mark.parametrize(
    "seconds, bound",
    [(0.0, 0.00002), (0.00002, 0.00002), (0.000021, 0.00005), (0.1, 0.1), (7.0, float("inf"))],
    ids=["zero", "on a bound", "above a bound", "on the last bound", "above all"],
)
def test_an_observation_falls_into_the_first_bucket_that_holds_it(metrics, seconds, bound):
    metrics.observe_placement("placed", seconds)
    counts = buckets(metrics, "kubelend_placement_duration_seconds", outcome="placed")
    assert min(upper for upper, count in counts.items() if count) == bound


def test_a_commit_counts_its_time_and_its_size(metrics):
    desk = make.desk(a="cpu=4,memory=8Gi")
    metrics.observe_commit(desk.changes * 5, 0.003)
    assert value(metrics, "kubelend_store_commit_duration_seconds_sum") == pytest.approx(0.003)
    counts = buckets(metrics, "kubelend_store_commit_changes")
    assert (counts[4], counts[8]) == (0, 1)
    assert value(metrics, "kubelend_store_commit_changes_sum") == 5


def test_a_reservation_that_ends_counts_once(metrics):
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


def test_every_way_to_end_shows_before_it_happens(metrics):
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


def test_a_conflict_counts_under_what_kept_most_clusters_from_it(metrics):
    desk = make.desk(a="cpu=1,memory=8Gi", b="cpu=1,memory=8Gi", c="cpu=8,memory=8Gi")
    desk.cordon("c")
    metrics.count_placement_failure(explanation(desk, "cpu=4,memory=1Gi"))
    assert value(metrics, "kubelend_placement_failures_total", reason="InsufficientCPU") == 1
    assert value(metrics, "kubelend_placement_failures_total", reason="Cordoned") == 0


def test_equal_refusals_count_under_the_one_that_is_told_first(metrics):
    desk = make.desk(a="cpu=1,memory=8Gi", c="cpu=8,memory=8Gi")
    desk.cordon("c")
    why = explanation(desk, "cpu=4,memory=1Gi")
    assert str(why) == "0/2 clusters fit: 1 Cordoned, 1 InsufficientCPU"
    metrics.count_placement_failure(why)
    assert value(metrics, "kubelend_placement_failures_total", reason="Cordoned") == 1


def test_a_conflict_without_clusters_has_its_own_reason(metrics):
    metrics.count_placement_failure(explanation(make.desk(), "cpu=1"))
    assert value(metrics, "kubelend_placement_failures_total", reason="NoClusters") == 1


def test_the_store_is_down_until_it_is_up(metrics):
    assert value(metrics, "kubelend_store_up") == 0
    metrics.set_store_up(up=True)
    assert value(metrics, "kubelend_store_up") == 1
    metrics.set_store_up(up=False)
    assert value(metrics, "kubelend_store_up") == 0


# -- the API


def test_an_answer_counts_by_route_method_and_status(metrics):
    metrics.observe_request("reserve", "POST", 201, 0.002)
    metrics.observe_request("reserve", "POST", 201, 0.004)
    metrics.observe_request("reserve", "POST", 409, 0.001)
    name = "kubelend_http_requests_total"
    assert value(metrics, name, route="reserve", method="POST", code="201") == 2
    assert value(metrics, name, route="reserve", method="POST", code="409") == 1
    seconds = "kubelend_http_request_duration_seconds"
    assert value(metrics, f"{seconds}_count", route="reserve") == 3
    assert value(metrics, f"{seconds}_sum", route="reserve") == pytest.approx(0.007)


def test_callers_cannot_make_up_series(metrics):
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
def test_every_route_is_known_by_name(metrics, route):
    metrics.observe_request(route.name, route.method, 200, 0.001)
    labels = {"route": route.name, "method": route.method, "code": "200"}
    assert value(metrics, "kubelend_http_requests_total", **labels) == 1


def test_a_refused_call_counts_by_error_code(metrics):
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


def test_open_and_refused_connections_are_counted(metrics):
    metrics.connection_opened()
    metrics.connection_opened()
    metrics.connection_closed()
    metrics.connection_rejected("OutOfFiles")
    assert value(metrics, "kubelend_open_connections") == 1
    assert value(metrics, "kubelend_connections_rejected_total", reason="OutOfFiles") == 1


def test_a_certificate_shows_when_it_ends(metrics):
    metrics.set_certificate_expiry("server", datetime(2031, 1, 1, tzinfo=UTC))
    metrics.set_certificate_expiry("server", datetime(2032, 1, 1, tzinfo=UTC))
    name = "kubelend_certificate_expiry_timestamp_seconds"
    assert value(metrics, name, name="server") == datetime(2032, 1, 1, tzinfo=UTC).timestamp()


def test_the_build_tells_its_version(metrics):
    assert value(metrics, "kubelend_build_info", version=kubelend.__version__) == 1


def test_two_brokers_in_one_process_count_apart():
    one, other = Metrics(), Metrics()
    one.observe_placement("placed", 0.001)
    assert value(other, "kubelend_placement_duration_seconds_count", outcome="placed") == 0


def test_counting_goes_on_while_another_thread_renders(metrics):
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
