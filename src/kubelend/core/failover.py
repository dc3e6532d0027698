"""Failover: moves reservations off unreachable providers.

`fail_over` is a command that the writer runs about once a second. Checking the fleet is one pass
over a column, so advertisements maintain no extra index. A provider only counts as unreachable for
the time in which this broker was able to receive advertisements; `ProviderMonitor` tracks that.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta

import numpy as np
from msgspec.structs import replace

from kubelend.core import commands, durations, explanations, quotas
from kubelend.core.commands import Command
from kubelend.core.durations import to_micros
from kubelend.core.events import Failed, FailoverBlocked, ProviderRecovered
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase, Reason, Role
from kubelend.core.members import MembershipStatus, member_id
from kubelend.core.models import Cluster, ClusterId, Reservation, ReservationId

MAX_ATTEMPTS_PER_RUN = 32
"""Placement attempts per run: a few milliseconds, in which no other request is served."""

RETRY_INTERVAL = timedelta(seconds=10)
"""Delay before blocked reservations are retried."""

CHECK_INTERVAL = timedelta(seconds=0.5)
MAX_CHECK_GAP = timedelta(seconds=10)
"""After a longer gap the process was suspended or its clock jumped: observation starts again."""


class ProviderMonitor:
    """Tracks unreachable providers and the reservations to move."""

    def __init__(self, lost_after: timedelta, ledger: Ledger, now: datetime) -> None:
        self._unreachable_after = lost_after
        """Zero disables failover."""
        self._observing_since = self._checked_at = self._retry_at = now
        self._unreachable: set[ClusterId] = set()
        self._pending: deque[ReservationId] = deque()
        self.blocked_clusters = _find_blocked_clusters(ledger)
        """Clusters that may have reservations with a blocked failover."""

    @property
    def is_busy(self) -> bool:
        """Whether reservations are left to be moved without delay."""
        return bool(self._pending)

    def start_check(self, now: datetime) -> bool:
        """Whether a check is due; if so, it is recorded as started."""
        gap = now - self._checked_at
        if timedelta() <= gap < CHECK_INTERVAL:
            return False
        if not timedelta() <= gap <= MAX_CHECK_GAP:
            self._observing_since = now
        self._checked_at = now
        return True

    def find_unreachable(self, ledger: Ledger, now: datetime) -> set[ClusterId]:
        """Enqueues the reservations of unreachable providers; returns the newly unreachable ones."""
        before, self._unreachable = self._unreachable, self._detect_unreachable(ledger, now)
        newly_unreachable = self._unreachable - before
        is_retry = not self._pending and now >= self._retry_at
        due = self._unreachable if is_retry else newly_unreachable
        for cluster in sorted(due):
            self._pending.extend(found.id for found in ledger.lent_by(cluster))
        if self._pending:
            self._retry_at = now + RETRY_INTERVAL
        return newly_unreachable

    def next_reservation(self, ledger: Ledger) -> Reservation | None:
        """The next reservation on an unreachable provider; None if there is none."""
        while self._pending:
            found = ledger.reservations.get(self._pending.popleft())
            if found is None or not found.is_live or found.target not in ledger.clusters:
                continue
            if found.target in self._unreachable:
                return found
        return None

    def _detect_unreachable(self, ledger: Ledger, now: datetime) -> set[ClusterId]:
        """Providers with reservations that were stale for too long while this broker observed."""
        fleet = ledger.fleet
        if not len(fleet) or int(fleet.valid_until.max()) <= to_micros(now):
            self._observing_since = now  # if all clusters are stale, this broker may be partitioned
        if not self._unreachable_after or now - self._observing_since < self._unreachable_after:
            return set()
        rows = np.flatnonzero(fleet.valid_until <= to_micros(now - self._unreachable_after))
        found = (fleet.ids[row] for row in rows.tolist())
        return {one for one in found if ledger.lent_count(one) and not _is_revoked(ledger, one)}


def fail_over(ledger: Ledger, monitor: ProviderMonitor, now: datetime) -> Command[list[Cluster]]:
    """Moves reservations off unreachable providers; returns the newly unreachable ones.

    A reservation that fits nowhere else stays, because the provider may return, and is retried. One whose
    requester wants no failover fails.
    """
    newly_unreachable: set[ClusterId] = set()
    if monitor.start_check(now):
        for cluster in sorted(monitor.blocked_clusters):
            yield from _mark_recovered(ledger, monitor, cluster, now)
        newly_unreachable = monitor.find_unreachable(ledger, now)
    for _ in range(MAX_ATTEMPTS_PER_RUN):
        found = monitor.next_reservation(ledger)
        if found is None:
            break
        provider = ledger.cluster(found.target or ClusterId(""))
        if provider.is_stale(now):  # it may have recovered since the last check
            yield from _fail_over_one(ledger, monitor, found, provider, now)
    return [ledger.cluster(cluster) for cluster in sorted(newly_unreachable)]


def _mark_recovered(
    ledger: Ledger, monitor: ProviderMonitor, cluster: ClusterId, now: datetime
) -> Command[None]:
    known = ledger.clusters.get(cluster)
    if known is not None and ledger.lent_count(cluster) and known.is_stale(now):
        return
    monitor.blocked_clusters.discard(cluster)
    for found in ledger.lent_by(cluster):
        if found.reason is Reason.PROVIDER_UNREACHABLE:
            yield ProviderRecovered(now, found.id)


def _fail_over_one(
    ledger: Ledger, monitor: ProviderMonitor, found: Reservation, provider: Cluster, now: datetime
) -> Command[None]:
    """The message omits why no cluster fits: that changes constantly, and `explain` reports it."""
    since = durations.format_time(provider.received_at, now)
    newly_unreachable = f"{provider.id}, unreachable since {since}"
    if not found.request.failover:
        message = f"Lost cluster {newly_unreachable}; failover is off"
        yield Failed(now, found.id, Reason.PROVIDER_UNREACHABLE, message)
        return
    chosen = explanations.choose_cluster(
        quotas.query_for_reservation(ledger, found, now), ledger.fleet
    )
    if chosen is not None:
        move = commands.move_event(ledger, found, chosen.cluster, now)
        yield replace(move, detail=f"Moved from {newly_unreachable}")
    elif found.reason is not Reason.PROVIDER_UNREACHABLE:
        monitor.blocked_clusters.add(provider.id)
        yield FailoverBlocked(
            now, found.id, f"Stays in cluster {newly_unreachable}; no other cluster fits yet"
        )


def _is_revoked(ledger: Ledger, cluster: ClusterId) -> bool:
    """A revoked cluster cannot advertise, and the revocation has decided about its reservations."""
    member = ledger.member_index.members.get(member_id(Role.CLUSTER, cluster))
    return member is not None and member.status is MembershipStatus.REVOKED


def _find_blocked_clusters(ledger: Ledger) -> set[ClusterId]:
    """Restores the set after a restart: the reason is part of the record."""
    if not any(ledger.phase_counts[phase, Reason.PROVIDER_UNREACHABLE] for phase in Phase):
        return set()
    found = ledger.reservations.values()
    return {one.target for one in found if one.target and one.reason is Reason.PROVIDER_UNREACHABLE}
