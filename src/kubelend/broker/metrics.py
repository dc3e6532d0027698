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
from kubelend.broker.families import Family
from kubelend.broker.gauges import FleetSnapshot
from kubelend.broker.tallies import Histogram, Labels, Tally
from kubelend.core.events import Change
from kubelend.core.explanations import Explanation
from kubelend.core.journal import Entry
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.models import Reservation
from kubelend.core.refusals import Refusal
from kubelend.wire import enrolment, routes

Outcome = Literal["placed", "queued", "rejected"]

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
NO_CLUSTERS: Final = "NoClusters"
"""Reason of a placement failure while no cluster is known."""

UNKNOWN: Final = "unknown"
"""Label value for any unknown route or method: callers must not be able to create time series."""

HANDSHAKE: Final = "handshake"
"""Label value in place of a route for clients rejected during the TLS handshake."""

_OUTCOMES: Final[tuple[Outcome, ...]] = ("placed", "queued", "rejected")
_ENDS: Final = (
    (Phase.RELEASED, Reason.BY_REQUESTER),
    (Phase.RELEASED, Reason.BY_ADMIN),
    (Phase.RELEASED, Reason.DELETED),
    (Phase.RELEASED, Reason.EXPIRED),
    (Phase.RELEASED, Reason.DRAINED),
    (Phase.FAILED, Reason.WAIT_TIMED_OUT),
    (Phase.FAILED, Reason.REFUSED),
)
_CONFLICTS: Final = (*Refusal, NO_CLUSTERS)
_METHODS: Final = {route.method for route in routes.ROUTES} | {"HEAD", "OPTIONS"}


class Metrics:
    """All metrics of one broker, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ledger = Ledger()
        self._gauge(families.BUILD_INFO).labels(kubelend.__version__).set(1)
        self._store_up = self._gauge(families.STORE_UP)
        self._certificates = self._gauge(families.CERTIFICATE_EXPIRY)
        self._decisions = self._histogram(families.DECISION_SECONDS)
        self._decided = {outcome: self._decisions.series(outcome) for outcome in _OUTCOMES}
        self._conflicts = self._tally(families.CONFLICTS, [(why,) for why in _CONFLICTS])
        self._commit_time = self._histogram(families.COMMIT_SECONDS).series()
        self._commit_size = self._histogram(families.COMMIT_CHANGES).series()
        self._finished = self._tally(families.FINISHED, _ENDS)
        self._calls = self._tally(families.HTTP_REQUESTS)
        self._call_times = self._histogram(families.HTTP_SECONDS)
        self._refused_calls = self._tally(families.REFUSED_CALLS)
        self._streams = self._gauge(families.STREAMS)
        self._connections = self._gauge(families.CONNECTIONS)
        self._refused_connections = self._tally(families.REFUSED_CONNECTIONS)
        ProcessCollector(registry=self.registry)

    # -- reported by the service

    def watch(self, ledger: Ledger) -> None:
        """Exports this ledger from now on."""
        self._ledger = ledger

    def decided(self, outcome: Outcome, seconds: float) -> None:
        self._decided[outcome].observe(seconds)

    def refused_for_capacity(self, explanation: Explanation) -> None:
        """Counts a request that no cluster fits under the most frequent rejection reason."""
        counts = explanation.refusals
        largest = min(counts, key=lambda why: (-counts[why], why), default=NO_CLUSTERS)
        self._conflicts.add(largest)

    def committed(self, changes: Sequence[Change], seconds: float) -> None:
        """Counts durable changes. A reservation becomes final in exactly one change, so it counts once."""
        self._commit_time.observe(seconds)
        audit_entries = 0
        for change in changes:
            if isinstance(change, Entry):
                audit_entries += 1
            elif isinstance(change, Reservation) and change.phase in FINAL:
                self._finished.add(change.phase, change.reason)
        self._commit_size.observe(len(changes) - audit_entries)

    def store_up(self, *, up: bool) -> None:
        self._store_up.set(up)

    # -- reported by the API

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a request to the route with this name."""
        counts = self._calls.counts
        key = (route, method, status)
        if key not in counts:
            route, method = _known_route(route), method if method in _METHODS else UNKNOWN
            key = (route, method, status)
            counts.setdefault(key, 0)
        counts[key] += 1
        self._call_times.series(route).observe(seconds)

    def refused(self, route: str, code: str) -> None:
        """Counts a request that was answered with this error code."""
        self._refused_calls.add(_known_route(route), code)

    def connection_opened(self) -> None:
        self._connections.inc()

    def connection_closed(self) -> None:
        self._connections.dec()

    def connection_refused(self, reason: str) -> None:
        """Counts a connection that was closed because of a limit; the reason is one of a few."""
        self._refused_connections.add(reason)

    def stream_opened(self) -> None:
        self._streams.inc()

    def stream_closed(self) -> None:
        self._streams.dec()

    def certificate(self, name: str, expires_at: datetime) -> None:
        """Exports when a certificate of the broker expires; the name is one of a few."""
        self._certificates.labels(name).set(expires_at.timestamp())

    # -- a scrape

    def snapshot(self, now: datetime) -> FleetSnapshot:
        """Copies the current ledger. Must be called in the event loop."""
        return gauges.take(self._ledger, now)

    def render(self, snapshot: FleetSnapshot) -> bytes:
        """Returns all metrics in the Prometheus text format. Call it in another thread."""
        return b"".join([generate_latest(self.registry), *gauges.text(snapshot)])

    # -- construction

    def _gauge(self, family: Family) -> Gauge:
        return Gauge(family.name, family.help, family.labels, registry=self.registry)

    def _tally(self, family: Family, known: Iterable[Labels] = ()) -> Tally:
        tally = Tally(family, known)
        self.registry.register(tally)
        return tally

    def _histogram(self, family: Family) -> Histogram:
        histogram = Histogram(family)
        self.registry.register(histogram)
        return histogram


def _known_route(route: str) -> str:
    return route if route in _ROUTES else UNKNOWN


_ROUTES: Final = routes.BY_NAME.keys() | enrolment.NAMES | {HANDSHAKE}
