"""What the broker tells its monitoring: the service and the API report here as they work.

The methods that report are called in the event loop for every call or commit, so they only count. A scrape
takes a `snapshot` in the event loop and has `render` write it as text in another thread. What each metric
means is in `broker.families`.
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

Outcome = Literal["placed", "queued", "refused"]

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
NO_CLUSTERS: Final = "NoClusters"
"""The reason of a conflict while no cluster advertises."""

UNKNOWN: Final = "unknown"
"""Stands for any route or method that is not ours: callers must not be able to make up series."""

HANDSHAKE: Final = "handshake"
"""Stands where a route would, for whoever was refused before a call could be made."""

_OUTCOMES: Final[tuple[Outcome, ...]] = ("placed", "queued", "refused")
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
    """All metrics of one broker, in a registry of their own."""

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

    # -- what the service reports

    def watch(self, ledger: Ledger) -> None:
        """Show this ledger from now on."""
        self._ledger = ledger

    def decided(self, outcome: Outcome, seconds: float) -> None:
        self._decided[outcome].observe(seconds)

    def refused_for_capacity(self, explanation: Explanation) -> None:
        """No cluster fits: count it under what kept most of them from it."""
        counts = explanation.refusals
        largest = min(counts, key=lambda why: (-counts[why], why), default=NO_CLUSTERS)
        self._conflicts.add(largest)

    def committed(self, changes: Sequence[Change], seconds: float) -> None:
        """These are durable. A reservation becomes final in one change of its life, so it counts once."""
        self._commit_time.observe(seconds)
        told = 0
        for change in changes:
            if isinstance(change, Entry):
                told += 1
            elif isinstance(change, Reservation) and change.phase in FINAL:
                self._finished.add(change.phase, change.reason)
        self._commit_size.observe(len(changes) - told)

    def store_up(self, *, up: bool) -> None:
        self._store_up.set(up)

    # -- what the API reports

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """A call of the route with this name was answered."""
        counts = self._calls.counts
        key = (route, method, status)
        if key not in counts:
            route, method = _known_route(route), method if method in _METHODS else UNKNOWN
            key = (route, method, status)
            counts.setdefault(key, 0)
        counts[key] += 1
        self._call_times.series(route).observe(seconds)

    def refused(self, route: str, code: str) -> None:
        """A call was answered with this error code."""
        self._refused_calls.add(_known_route(route), code)

    def connection_opened(self) -> None:
        self._connections.inc()

    def connection_closed(self) -> None:
        self._connections.dec()

    def connection_refused(self, reason: str) -> None:
        """A connection was closed because of a limit, which is one of a few."""
        self._refused_connections.add(reason)

    def stream_opened(self) -> None:
        self._streams.inc()

    def stream_closed(self) -> None:
        self._streams.dec()

    def certificate(self, name: str, expires_at: datetime) -> None:
        """A certificate that the broker uses; the name says what for, and is one of a few."""
        self._certificates.labels(name).set(expires_at.timestamp())

    # -- a scrape

    def snapshot(self, now: datetime) -> FleetSnapshot:
        """The ledger as it is. To be called in the event loop."""
        return gauges.take(self._ledger, now)

    def render(self, snapshot: FleetSnapshot) -> bytes:
        """Everything, in the text format of Prometheus. To be called in another thread."""
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
