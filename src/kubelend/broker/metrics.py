"""Prometheus metrics of the broker: definitions, cheap counters and histograms, and gauges of the ledger.

The methods that count are called in the event loop for every request or commit, so they only add numbers. A
scrape takes a `snapshot` in the event loop and renders it as text in another thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, chain
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import kubelend
from kubelend.broker.ports import Leadership
from kubelend.core.audit_log import AuditEntry
from kubelend.core.events import Change, StoreLag
from kubelend.core.explanations import Explanation
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Reason, Rejection
from kubelend.core.models import Advertisement, Cluster, ClusterId, Quota, Reservation
from kubelend.core.prices import BILLIONTHS
from kubelend.core.resources import Resources
from kubelend.wire import routes

PlacementOutcome = Literal["placed", "queued", "rejected"]

METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
NO_CLUSTERS: Final = "NoClusters"
"""Reason of a placement failure while no cluster is known."""

UNKNOWN_LABEL: Final = "unknown"
"""Label value for any unknown route or method: callers must not be able to create time series."""

HANDSHAKE_ROUTE: Final = "handshake"
"""Label value in place of a route for clients rejected during the TLS handshake."""

_PLACEMENT_OUTCOMES: Final[tuple[PlacementOutcome, ...]] = ("placed", "queued", "rejected")
_FINAL_STATES: Final = (
    (Phase.RELEASED, Reason.BY_REQUESTER),
    (Phase.RELEASED, Reason.BY_ADMIN),
    (Phase.RELEASED, Reason.DELETED),
    (Phase.RELEASED, Reason.EXPIRED),
    (Phase.RELEASED, Reason.DRAINED),
    (Phase.FAILED, Reason.WAIT_TIMED_OUT),
    (Phase.FAILED, Reason.REFUSED),
)
_FAILURE_REASONS: Final = (*Rejection, NO_CLUSTERS)
_HTTP_METHODS: Final = {route.method for route in routes.ROUTES} | {"HEAD", "OPTIONS"}


class BrokerMetrics:
    """All metrics of one broker, in their own registry."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._ledger = Ledger()
        self._gauge(BUILD_INFO).labels(kubelend.__version__).set(1)
        self._store_up_gauge = self._gauge(STORE_UP)
        self._leader_gauge = self._gauge(LEADER)
        self._certificate_expiry = self._gauge(CERTIFICATE_EXPIRY)
        placement_duration = FastHistogram(PLACEMENT_DURATION, registry)
        self._placement_series = {
            outcome: placement_duration.series(outcome) for outcome in _PLACEMENT_OUTCOMES
        }
        self._placement_failures = FastCounter(
            PLACEMENT_FAILURES, registry, [(reason,) for reason in _FAILURE_REASONS]
        )
        self._commit_time = FastHistogram(STORE_COMMIT_DURATION, registry).series()
        self._commit_size = FastHistogram(STORE_COMMIT_CHANGES, registry).series()
        self._finished = FastCounter(RESERVATIONS_FINISHED, registry, _FINAL_STATES)
        self._requests = FastCounter(HTTP_REQUESTS, registry)
        self._request_duration = FastHistogram(HTTP_REQUEST_DURATION, registry)
        self._requests_rejected = FastCounter(HTTP_REQUESTS_REJECTED, registry)
        self._streams = self._gauge(OPEN_STREAMS)
        self._connections = self._gauge(OPEN_CONNECTIONS)
        self._connections_rejected = FastCounter(CONNECTIONS_REJECTED, registry)
        ProcessCollector(registry=self.registry)

    # -- reported by the service

    def set_ledger(self, ledger: Ledger) -> None:
        """Exports this ledger from now on."""
        self._ledger = ledger

    def observe_placement(self, outcome: PlacementOutcome, seconds: float) -> None:
        self._placement_series[outcome].observe(seconds)

    def count_placement_failure(self, explanation: Explanation) -> None:
        """Counts a request that no cluster fits under the most frequent rejection reason."""
        counts = explanation.rejections
        largest = min(counts, key=lambda reason: (-counts[reason], reason), default=NO_CLUSTERS)
        self._placement_failures.add(largest)

    def observe_commit(self, changes: Sequence[Change], seconds: float) -> None:
        """Counts durable changes. A reservation becomes final in exactly one change, so it counts once."""
        self._commit_time.observe(seconds)
        audit_entries = 0
        for change in changes:
            if isinstance(change, AuditEntry):
                audit_entries += 1
            elif isinstance(change, Reservation) and change.phase in FINAL:
                self._finished.add(change.phase, change.reason)
        self._commit_size.observe(len(changes) - audit_entries)

    def set_store_up(self, *, up: bool) -> None:
        self._store_up_gauge.set(up)

    def watch_store(self, lag: Callable[[], StoreLag]) -> None:
        self._gauge(STORE_LAG_CHANGES).set_function(lambda: lag().changes)
        self._gauge(STORE_LAG_SECONDS).set_function(lambda: lag().seconds)

    def watch_leadership(self, leadership: Leadership) -> None:
        self._leader_gauge.set_function(lambda: leadership.is_leader)

    # -- reported by the API

    def observe_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a request to the route with this name."""
        counts = self._requests.counts
        key = (route, method, status)
        if key not in counts:
            route = _route_label(route)
            method = method if method in _HTTP_METHODS else UNKNOWN_LABEL
            key = (route, method, status)
            counts.setdefault(key, 0)
        counts[key] += 1
        self._request_duration.series(route).observe(seconds)

    def count_rejected_request(self, route: str, code: str) -> None:
        """Counts a request that was answered with this error code."""
        self._requests_rejected.add(_route_label(route), code)

    def connection_opened(self) -> None:
        self._connections.inc()

    def connection_closed(self) -> None:
        self._connections.dec()

    def connection_rejected(self, reason: str) -> None:
        """Counts a connection that was closed because of a limit; the reason is one of a few."""
        self._connections_rejected.add(reason)

    def stream_opened(self) -> None:
        self._streams.inc()

    def stream_closed(self) -> None:
        self._streams.dec()

    def set_certificate_expiry(self, name: str, expires_at: datetime) -> None:
        """Exports when a certificate of the broker expires; the name is one of a few."""
        self._certificate_expiry.labels(name).set(expires_at.timestamp())

    # -- a scrape

    def snapshot(self, now: datetime) -> FleetSnapshot:
        """Copies the current ledger. Must be called in the event loop."""
        ledger = self._ledger
        return FleetSnapshot(
            now,
            list(ledger.clusters.values()),
            list(map(ledger.reserved, ledger.clusters)),
            dict(ledger.phase_counts),
            ledger.waiting_count,
            list(ledger.reservations.values()),
            [
                (requester, usage.quota, usage.spent_today(now))
                for requester, usage in ledger.quota_usages.by_requester.items()
            ],
        )

    def render(self, snapshot: FleetSnapshot) -> bytes:
        """Returns all metrics in the Prometheus text format. Call it in another thread."""
        return b"".join([generate_latest(self.registry), *fleet_metrics_text(snapshot)])

    # -- construction

    def _gauge(self, family: MetricFamily) -> Gauge:
        return Gauge(family.name, family.help, family.labels, registry=self.registry)


def _route_label(route: str) -> str:
    return route if route in _ROUTE_LABELS else UNKNOWN_LABEL


_ROUTE_LABELS: Final = (
    routes.ROUTES_BY_NAME.keys() | routes.ENROLMENT_ROUTE_NAMES | {HANDSHAKE_ROUTE}
)


DECISION_BUCKETS: Final = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
"""Histogram buckets for placement decisions: the target is 100 us over 10,000 clusters."""

LATENCY_BUCKETS: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Histogram buckets for disk and network latencies."""

SIZE_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class MetricFamily(NamedTuple):
    """One metric with all its time series."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


BUILD_INFO: Final = MetricFamily(
    "kubelend_build_info", "Version of the broker; the value is always 1", ("version",)
)
STORE_UP: Final = MetricFamily(
    "kubelend_store_up",
    "Whether this broker is the leader and its store accepts writes (1) or not (0)",
)
LEADER: Final = MetricFamily("kubelend_leader", "Whether this broker is the leader (1) or not (0)")
CERTIFICATE_EXPIRY: Final = MetricFamily(
    "kubelend_certificate_expiry_timestamp_seconds",
    "Expiry time of a certificate that the broker uses, as a Unix timestamp",
    ("name",),
)
OPEN_STREAMS: Final = MetricFamily("kubelend_open_streams", "Number of open instruction streams")
OPEN_CONNECTIONS: Final = MetricFamily(
    "kubelend_open_connections",
    "Number of open connections to the TLS ports, including unfinished handshakes",
)
CONNECTIONS_REJECTED: Final = MetricFamily(
    "kubelend_connections_rejected_total",
    "Number of connections closed because of a limit: TooManyConnections, TooManyOfCaller, ...",
    ("reason",),
)

PLACEMENT_DURATION: Final = MetricFamily(
    "kubelend_placement_duration_seconds",
    "Duration of placement decisions, without the commit; outcome is placed, queued or rejected",
    ("outcome",),
    buckets=DECISION_BUCKETS,
)
PLACEMENT_FAILURES: Final = MetricFamily(
    "kubelend_placement_failures_total",
    "Number of requests rejected because no cluster fits, by the most frequent rejection reason",
    ("reason",),
)
STORE_COMMIT_DURATION: Final = MetricFamily(
    "kubelend_store_commit_duration_seconds",
    "Duration of group commits to the store, until the changes are durable",
    buckets=LATENCY_BUCKETS,
)
STORE_COMMIT_CHANGES: Final = MetricFamily(
    "kubelend_store_commit_changes", "Number of changes per group commit", buckets=SIZE_BUCKETS
)
STORE_LAG_CHANGES: Final = MetricFamily(
    "kubelend_store_lag_changes",
    "Number of durable changes that the objects of a Kubernetes store do not show yet",
)
STORE_LAG_SECONDS: Final = MetricFamily(
    "kubelend_store_lag_seconds",
    "Duration since the oldest of these changes became durable",
)
RESERVATIONS_FINISHED: Final = MetricFamily(
    "kubelend_reservations_finished_total",
    "Number of reservations that ended, by final phase and reason",
    ("phase", "reason"),
)

RESERVATIONS: Final = MetricFamily(
    "kubelend_reservations",
    "Number of reservations by phase and reason, without archived ones",
    ("phase", "reason"),
)
PENDING_REQUESTS: Final = MetricFamily(
    "kubelend_pending_requests", "Number of requests waiting for capacity"
)
CLUSTERS: Final = MetricFamily(
    "kubelend_clusters",
    "Number of known clusters; state is active, cordoned or stale (a stale cluster counts only as stale)",
    ("state",),
)
CLUSTERS_OVERCOMMITTED: Final = MetricFamily(
    "kubelend_clusters_overcommitted",
    "Number of clusters whose own pods use resources that are reserved for others",
)
CLUSTER_ACTIVE: Final = MetricFamily(
    "kubelend_cluster_active",
    "Whether the cluster's advertisement is current (1) or stale (0)",
    ("cluster",),
)
CLUSTER_ADVERTISED: Final = MetricFamily(
    "kubelend_cluster_last_advertisement_timestamp_seconds",
    "Time of the last advertisement that the broker received, as a Unix timestamp",
    ("cluster",),
)
CLUSTER_CERTIFICATE_EXPIRY: Final = MetricFamily(
    "kubelend_cluster_certificate_expiry_timestamp_seconds",
    "Expiry time of the certificate that the cluster last advertised with, as a Unix timestamp",
    ("cluster",),
)
CLUSTER_CAPACITY: Final = MetricFamily(
    "kubelend_cluster_capacity",
    "Capacity of the cluster, in cores, bytes or devices",
    ("cluster", "resource"),
)
CLUSTER_ALLOCATABLE: Final = MetricFamily(
    "kubelend_cluster_allocatable",
    "Allocatable resources of the cluster, in cores, bytes or devices",
    ("cluster", "resource"),
)
CLUSTER_RESERVED: Final = MetricFamily(
    "kubelend_cluster_reserved",
    "Resources that live reservations hold in the cluster, in cores, bytes or devices",
    ("cluster", "resource"),
)
CLUSTER_AVAILABLE: Final = MetricFamily(
    "kubelend_cluster_available",
    "Resources that can be reserved in the cluster now, in cores, bytes or devices; zero while it is stale,"
    " cordoned or revoked",
    ("cluster", "resource"),
)

REQUESTER_RESERVED: Final = MetricFamily(
    "kubelend_requester_reserved",
    "Resources that the live reservations of a requester hold, in cores, bytes or devices",
    ("requester", "resource"),
)
REQUESTER_PENDING: Final = MetricFamily(
    "kubelend_requester_pending_requests",
    "Number of requests of a requester that wait for capacity",
    ("requester",),
)
REQUESTER_QUOTA: Final = MetricFamily(
    "kubelend_requester_quota",
    "Quota of a requester, in cores, bytes or devices; of the resource reservations, their number",
    ("requester", "resource"),
)
REQUESTER_SPENT: Final = MetricFamily(
    "kubelend_requester_spent_today",
    "Cost of the current UTC day of a requester with a budget, up to the expiry of its reservations",
    ("requester", "currency"),
)
REQUESTER_BUDGET: Final = MetricFamily(
    "kubelend_requester_daily_budget", "Daily budget of a requester", ("requester", "currency")
)

HTTP_REQUESTS: Final = MetricFamily(
    "kubelend_http_requests_total",
    "Number of HTTP requests by route and status code; 499 if the client disconnected first",
    ("route", "method", "code"),
)
HTTP_REQUEST_DURATION: Final = MetricFamily(
    "kubelend_http_request_duration_seconds",
    "Duration of HTTP requests from headers to response; for streams, how long they were open",
    ("route",),
    buckets=LATENCY_BUCKETS,
)
HTTP_REQUESTS_REJECTED: Final = MetricFamily(
    "kubelend_http_requests_rejected_total",
    "Number of HTTP requests answered with an error, by error code: Forbidden, RateLimited, ...",
    ("route", "code"),
)

_CLUSTER_FAMILIES: Final = (
    *(CLUSTER_ACTIVE, CLUSTER_ADVERTISED, CLUSTER_CERTIFICATE_EXPIRY),
    *(CLUSTER_CAPACITY, CLUSTER_ALLOCATABLE, CLUSTER_RESERVED, CLUSTER_AVAILABLE),
)
_REQUESTER_FAMILIES: Final = (
    *(REQUESTER_RESERVED, REQUESTER_PENDING),
    *(REQUESTER_QUOTA, REQUESTER_SPENT, REQUESTER_BUDGET),
)
ALL_METRICS: Final = (
    *(BUILD_INFO, STORE_UP, LEADER, CERTIFICATE_EXPIRY),
    *(PLACEMENT_DURATION, PLACEMENT_FAILURES, STORE_COMMIT_DURATION, STORE_COMMIT_CHANGES),
    *(STORE_LAG_CHANGES, STORE_LAG_SECONDS),
    *(RESERVATIONS, RESERVATIONS_FINISHED, PENDING_REQUESTS),
    *(CLUSTERS, CLUSTERS_OVERCOMMITTED, *_CLUSTER_FAMILIES, *_REQUESTER_FAMILIES),
    *(HTTP_REQUESTS, HTTP_REQUEST_DURATION, HTTP_REQUESTS_REJECTED, OPEN_STREAMS),
    *(OPEN_CONNECTIONS, CONNECTIONS_REJECTED),
)


LabelValues = tuple[str | int, ...]


class FastCounter(Collector):
    """A counter with all its time series."""

    def __init__(
        self, family: MetricFamily, registry: CollectorRegistry, known: Iterable[LabelValues] = ()
    ) -> None:
        """The known series start at zero, so that `rate` sees their first increase."""
        self.counts: dict[LabelValues, int] = dict.fromkeys(known, 0)
        self._family = family
        registry.register(self)

    def add(self, *labels: str | int) -> None:
        self.counts[labels] = self.counts.get(labels, 0) + 1

    def collect(self) -> Iterator[Metric]:
        family = self._family
        metric = CounterMetricFamily(family.name, family.help, labels=family.labels)
        for labels, count in self.counts.copy().items():
            metric.add_metric([str(label) for label in labels], count)
        yield metric


class HistogramSeries:
    """One time series of a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, amount: float) -> None:
        self.counts[bisect_left(self.bounds, amount)] += 1
        self.total += amount


class FastHistogram(Collector):
    """A histogram with all its time series."""

    def __init__(self, family: MetricFamily, registry: CollectorRegistry) -> None:
        self._family = family
        self._bounds = [*map(str, family.buckets), "+Inf"]
        self._series: dict[LabelValues, HistogramSeries] = {}
        registry.register(self)

    def series(self, *labels: str | int) -> HistogramSeries:
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = HistogramSeries(self._family.buckets)
        return found

    def collect(self) -> Iterator[Metric]:
        family = self._family
        metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, series in self._series.copy().items():
            total, counts = series.total, accumulate(series.counts.copy())
            buckets = list(zip(self._bounds, counts, strict=True))
            metric.add_metric([str(label) for label in labels], buckets, total)
        yield metric


class FleetSnapshot(NamedTuple):
    """The part of the ledger that the gauges need, at a point in time. Immutable."""

    now: datetime
    clusters: list[Cluster]
    reserved: list[Resources]
    """Reserved resources of each cluster, in the same order."""
    reservation_counts: dict[tuple[Phase, Reason], int]
    pending_requests: int
    reservations: list[Reservation]
    quotas: list[tuple[ClusterId, Quota, int]]
    """Requesters with a quota, and what they have spent today, in billionths."""


def fleet_metrics_text(snapshot: FleetSnapshot) -> list[bytes]:
    """Returns the snapshot in the Prometheus text format, in chunks. May run in any thread."""
    fleet = _FleetText()
    for number, (cluster, reserved) in enumerate(
        zip(snapshot.clusters, snapshot.reserved, strict=True), start=1
    ):
        fleet.add(cluster, reserved, snapshot.now)
        if number % CLUSTERS_PER_CHUNK == 0:
            fleet.encode_lines()
            time.sleep(CHUNK_PAUSE)
    return [*_totals_text(snapshot, fleet), *fleet.chunks(), *_requesters_text(snapshot)]


CLUSTERS_PER_CHUNK: Final = 50
RESERVATIONS_PER_PAUSE: Final = 500
CHUNK_PAUSE: Final = 0.0001
"""The thread sleeps after this many clusters or reservations, so that the event loop waits about one
millisecond for the interpreter lock, and not five."""

_BASE_UNIT_RESOURCES: Final = tuple(
    (name, attrgetter(name)) for name in ("memory", "gpu", "storage")
)
"""The named resources whose unit is the base unit already."""

_CLUSTER_STATES: Final = ("active", "cordoned", "stale")
_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


_ResourceRow = tuple[str, float, float, float, float]
"""A resource and, in base units: capacity, allocatable, reserved, free (may be negative)."""


class _FleetText:
    """Collects the lines of all clusters by metric, as the format requires."""

    def __init__(self) -> None:
        self.states = Counter(dict.fromkeys(_CLUSTER_STATES, 0))
        self.overcommitted = 0
        self._lines: tuple[list[str], ...] = tuple([] for _ in _CLUSTER_FAMILIES)
        self._chunks = [[_metric_header(family)] for family in _CLUSTER_FAMILIES]

    def add(self, cluster: Cluster, reserved: Resources, now: datetime) -> None:
        active, advertised, certificate, capacities, allocatables, lents, availables = self._lines
        stale = cluster.is_stale(now)
        self.states["stale" if stale else "active" if cluster.cordon is None else "cordoned"] += 1
        label = f'cluster="{cluster.id.translate(_LABEL_ESCAPES)}"'
        active.append(f"kubelend_cluster_active{{{label}}} {int(not stale)}\n")
        received = cluster.received_at.timestamp()
        advertised.append(f"{CLUSTER_ADVERTISED.name}{{{label}}} {received}\n")
        if (until := cluster.certificate_until) is not None:
            name = CLUSTER_CERTIFICATE_EXPIRY.name
            certificate.append(f"{name}{{{label}}} {until.timestamp()}\n")
        # The cordon of a revoked cluster says so, too.
        overcommitted, is_open = False, not stale and cluster.cordon is None
        for resource, capacity, allocatable, lent, free in _resource_rows(cluster, reserved):
            labels = f'{{{label},resource="{resource}"}}'
            capacities.append(f"kubelend_cluster_capacity{labels} {capacity}\n")
            allocatables.append(f"kubelend_cluster_allocatable{labels} {allocatable}\n")
            lents.append(f"kubelend_cluster_reserved{labels} {lent}\n")
            available = max(free, 0) if is_open else 0
            availables.append(f"kubelend_cluster_available{labels} {available}\n")
            overcommitted = overcommitted or free < 0
        self.overcommitted += overcommitted

    def encode_lines(self) -> None:
        """Encodes lines in small steps: a single step would hold the interpreter lock for too long."""
        for chunks, lines in zip(self._chunks, self._lines, strict=True):
            chunks.append("".join(lines).encode())
            lines.clear()

    def chunks(self) -> Iterator[bytes]:
        self.encode_lines()
        return chain.from_iterable(self._chunks)


def _resource_rows(cluster: Cluster, reserved: Resources) -> Iterator[_ResourceRow]:
    """Yields CPU and memory always, and every other resource that the cluster has or lends."""
    offer = cluster.advertisement
    capacity, allocatable, allocated = offer.capacity, offer.allocatable, offer.allocated
    has, most, lent = capacity.cpu, allocatable.cpu, reserved.cpu
    yield "cpu", has / 1000, most / 1000, lent / 1000, (most - allocated.cpu - lent) / 1000
    for name, of in _BASE_UNIT_RESOURCES:
        has, most, lent = of(capacity), of(allocatable), of(reserved)
        if has or most or lent or name == "memory":
            yield name, has, most, lent, most - of(allocated) - lent
    if capacity.extended or allocatable.extended or reserved.extended:
        yield from _extended_rows(offer, reserved)


def _extended_rows(offer: Advertisement, reserved: Resources) -> Iterator[_ResourceRow]:
    parts = offer.capacity, offer.allocatable, reserved
    for name in sorted({name for part in parts for name in part.extended}):
        has, most, lent = (part.amount(name) for part in parts)
        yield name, has, most, lent, most - offer.allocated.amount(name) - lent


def _requesters_text(snapshot: FleetSnapshot) -> Iterator[bytes]:
    reserved, pending = _usage_by_requester(snapshot.reservations)
    limits = {requester: _quota_amounts(quota) for requester, quota, _ in snapshot.quotas}
    budgets = [found for found in snapshot.quotas if found[1].budget is not None]
    labels = [(requester, quota.currency) for requester, quota, _ in budgets]
    yield _series_text(REQUESTER_RESERVED, _amount_series(reserved))
    yield _series_text(REQUESTER_PENDING, [((name,), count) for name, count in pending.items()])
    yield _series_text(REQUESTER_QUOTA, _amount_series(limits))
    spent = [billionths / BILLIONTHS for _, _, billionths in budgets]
    yield _series_text(REQUESTER_SPENT, zip(labels, spent, strict=True))
    most = [(quota.budget or 0) / BILLIONTHS for _, quota, _ in budgets]
    yield _series_text(REQUESTER_BUDGET, zip(labels, most, strict=True))


def _usage_by_requester(
    reservations: list[Reservation],
) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """The amounts that requesters hold, and their numbers of waiting requests."""
    reserved: defaultdict[str, Counter[str]] = defaultdict(Counter)
    pending: Counter[str] = Counter()
    for number, found in enumerate(reservations, start=1):
        if found.is_live:
            reserved[found.requester].update(dict(found.request.resources.items()))
        elif found.phase is Phase.PENDING:
            pending[found.requester] += 1
        if number % RESERVATIONS_PER_PAUSE == 0:
            time.sleep(CHUNK_PAUSE)
    return reserved, pending


def _quota_amounts(quota: Quota) -> dict[str, int]:
    counted = {} if quota.reservations is None else {"reservations": quota.reservations}
    return {**quota.amounts, **counted}


def _amount_series(
    amounts: Mapping[str, Mapping[str, int]] | Mapping[ClusterId, Mapping[str, int]],
) -> Iterator[tuple[tuple[str, str], float]]:
    for requester, by_resource in amounts.items():
        for resource, amount in by_resource.items():
            yield (requester, resource), amount / 1000 if resource == "cpu" else amount


def _totals_text(snapshot: FleetSnapshot, fleet: _FleetText) -> Iterator[bytes]:
    by_phase = {
        (str(phase), str(reason)): count
        for (phase, reason), count in snapshot.reservation_counts.items()
    }
    yield _series_text(RESERVATIONS, by_phase.items())
    yield _series_text(PENDING_REQUESTS, [((), snapshot.pending_requests)])
    yield _series_text(CLUSTERS, [((state,), n) for state, n in fleet.states.items()])
    yield _series_text(CLUSTERS_OVERCOMMITTED, [((), fleet.overcommitted)])


def _series_text(family: MetricFamily, series: Iterable[tuple[tuple[str, ...], float]]) -> bytes:
    lines = [_metric_header(family).decode()]
    for values, number in series:
        pairs = zip(family.labels, values, strict=True)
        labels = ",".join(f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in pairs)
        lines.append(
            f"{family.name}{{{labels}}} {number}\n" if labels else f"{family.name} {number}\n"
        )
    return "".join(lines).encode()


def _metric_header(family: MetricFamily) -> bytes:
    return f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n".encode()
