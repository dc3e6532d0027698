"""Prometheus metrics of the broker: definitions, cheap counters and histograms, and gauges of the ledger.

The methods that count are called in the event loop for every request or commit, so they only add numbers. A
scrape takes a `snapshot` in the event loop and renders it as text in another thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final, Literal

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    generate_latest,
)

import kubelend
from kubelend.broker import families, gauges
from kubelend.broker.families import MetricFamily
from kubelend.broker.gauges import FleetSnapshot
from kubelend.broker.tallies import FastCounter, FastHistogram, LabelValues
from kubelend.core.events import Change
from kubelend.core.explanations import Explanation
from kubelend.core.journal import AuditEntry
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.models import Reservation
from kubelend.core.refusals import Rejection
from kubelend.wire import enrolment, routes

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


class Metrics:
    """All metrics of one broker, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ledger = Ledger()
        self._gauge(families.BUILD_INFO).labels(kubelend.__version__).set(1)
        self._store_up_gauge = self._gauge(families.STORE_UP)
        self._certificate_expiry = self._gauge(families.CERTIFICATE_EXPIRY)
        self._placement_duration = self._histogram(families.PLACEMENT_DURATION)
        self._placement_series = {
            outcome: self._placement_duration.series(outcome) for outcome in _PLACEMENT_OUTCOMES
        }
        self._placement_failures = self._counter(
            families.PLACEMENT_FAILURES, [(why,) for why in _FAILURE_REASONS]
        )
        self._commit_time = self._histogram(families.STORE_COMMIT_DURATION).series()
        self._commit_size = self._histogram(families.STORE_COMMIT_CHANGES).series()
        self._finished = self._counter(families.RESERVATIONS_FINISHED, _FINAL_STATES)
        self._requests = self._counter(families.HTTP_REQUESTS)
        self._request_duration = self._histogram(families.HTTP_REQUEST_DURATION)
        self._requests_rejected = self._counter(families.HTTP_REQUESTS_REJECTED)
        self._streams = self._gauge(families.OPEN_STREAMS)
        self._connections = self._gauge(families.OPEN_CONNECTIONS)
        self._connections_rejected = self._counter(families.CONNECTIONS_REJECTED)
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
        largest = min(counts, key=lambda why: (-counts[why], why), default=NO_CLUSTERS)
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

    # -- reported by the API

    def observe_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a request to the route with this name."""
        counts = self._requests.counts
        key = (route, method, status)
        if key not in counts:
            route, method = (
                _route_label(route),
                method if method in _HTTP_METHODS else UNKNOWN_LABEL,
            )
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
        return gauges.fleet_snapshot(self._ledger, now)

    def render(self, snapshot: FleetSnapshot) -> bytes:
        """Returns all metrics in the Prometheus text format. Call it in another thread."""
        return b"".join([generate_latest(self.registry), *gauges.fleet_metrics_text(snapshot)])

    # -- construction

    def _gauge(self, family: MetricFamily) -> Gauge:
        return Gauge(family.name, family.help, family.labels, registry=self.registry)

    def _counter(self, family: MetricFamily, known: Iterable[LabelValues] = ()) -> FastCounter:
        tally = FastCounter(family, known)
        self.registry.register(tally)
        return tally

    def _histogram(self, family: MetricFamily) -> FastHistogram:
        histogram = FastHistogram(family)
        self.registry.register(histogram)
        return histogram


def _route_label(route: str) -> str:
    return route if route in _ROUTE_LABELS else UNKNOWN_LABEL


_ROUTE_LABELS: Final = (
    routes.ROUTES_BY_NAME.keys() | enrolment.ENROLMENT_ROUTE_NAMES | {HANDSHAKE_ROUTE}
)
