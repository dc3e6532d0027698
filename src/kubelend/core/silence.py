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

from kubelend.core import commands, decision, instants, quotas
from kubelend.core.commands import Command
from kubelend.core.events import Regained, Stranded
from kubelend.core.instants import micros
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.members import Standing, member_id
from kubelend.core.models import Cluster, ClusterId, Reservation, ReservationId
from kubelend.core.roles import Role

MOST_TRIED = 32
"""Placement attempts per run: a few milliseconds, in which no other request is served."""

TRY_AGAIN = timedelta(seconds=10)
"""Delay before blocked reservations are retried."""

LOOK_EVERY = timedelta(seconds=0.5)
LONGEST_GAP = timedelta(seconds=10)
"""Longest gap between two checks. After a longer one the process was suspended or its clock jumped,
and observation starts again.
"""


class Vigil:
    """Tracks unreachable providers and the reservations to move."""

    def __init__(self, lost_after: timedelta, ledger: Ledger, now: datetime) -> None:
        self._lost_after = lost_after
        """Zero disables failover."""
        self._since = self._looked_at = self._again_at = now
        self._lost: set[ClusterId] = set()
        self._untried: deque[ReservationId] = deque()
        self.stranding = _stranding(ledger)
        """Clusters that may have reservations with a blocked failover."""

    @property
    def is_busy(self) -> bool:
        """Whether reservations are left to be moved without delay."""
        return bool(self._untried)

    def begin(self, now: datetime) -> bool:
        """Whether a check is due; if so, it is recorded as started."""
        gap = now - self._looked_at
        if timedelta() <= gap < LOOK_EVERY:
            return False
        if not timedelta() <= gap <= LONGEST_GAP:
            self._since = now
        self._looked_at = now
        return True

    def look(self, ledger: Ledger, now: datetime) -> set[ClusterId]:
        """Detects unreachable providers and enqueues their reservations; returns the newly
        unreachable ones.
        """
        before, self._lost = self._lost, self._silent(ledger, now)
        given_up = self._lost - before
        due = self._lost if not self._untried and now >= self._again_at else given_up
        for cluster in sorted(due):
            self._untried.extend(found.id for found in ledger.lent_by(cluster))
        if self._untried:
            self._again_at = now + TRY_AGAIN
        return given_up

    def take(self, ledger: Ledger) -> Reservation | None:
        """The next reservation on an unreachable provider; None if there is none."""
        while self._untried:
            found = ledger.reservations.get(self._untried.popleft())
            if found is None or not found.is_live or found.target not in ledger.clusters:
                continue
            if found.target in self._lost:
                return found
        return None

    def _silent(self, ledger: Ledger, now: datetime) -> set[ClusterId]:
        """Providers with live reservations that have been stale for too long while this broker was
        observing.
        """
        fleet = ledger.fleet
        if not len(fleet) or int(fleet.valid_until.max()) <= micros(now):
            self._since = now  # if all clusters are stale, this broker may be partitioned
        if not self._lost_after or now - self._since < self._lost_after:
            return set()
        rows = np.flatnonzero(fleet.valid_until <= micros(now - self._lost_after))
        found = (fleet.ids[row] for row in rows.tolist())
        return {one for one in found if ledger.lent_count(one) and not _is_revoked(ledger, one)}


def leave(ledger: Ledger, vigil: Vigil, now: datetime) -> Command[list[Cluster]]:
    """Moves reservations off unreachable providers; returns the newly unreachable ones.

    A reservation that fits nowhere else stays, because the provider may return, and is retried.
    """
    given_up: set[ClusterId] = set()
    if vigil.begin(now):
        for cluster in sorted(vigil.stranding):
            yield from _regain(ledger, vigil, cluster, now)
        given_up = vigil.look(ledger, now)
    for _ in range(MOST_TRIED):
        found = vigil.take(ledger)
        if found is None:
            break
        provider = ledger.cluster(found.target or ClusterId(""))
        if provider.is_stale(now):  # it may have recovered since the last check
            yield from _leave_one(ledger, vigil, found, provider, now)
    return [ledger.cluster(cluster) for cluster in sorted(given_up)]


def _regain(ledger: Ledger, vigil: Vigil, cluster: ClusterId, now: datetime) -> Command[None]:
    known = ledger.clusters.get(cluster)
    if known is not None and ledger.lent_count(cluster) and known.is_stale(now):
        return
    vigil.stranding.discard(cluster)
    for found in ledger.lent_by(cluster):
        if found.reason is Reason.PROVIDER_SILENT:
            yield Regained(now, found.id)


def _leave_one(
    ledger: Ledger, vigil: Vigil, found: Reservation, provider: Cluster, now: datetime
) -> Command[None]:
    """The message does not say why no cluster fits: that changes constantly, and `explain` reports it."""
    since = instants.time_of_day(provider.received_at, now)
    unreachable = f"{provider.id}, unreachable since {since}"
    chosen = decision.choose(quotas.question_of(ledger, found, now), ledger.fleet)
    if chosen is not None:
        move = commands.moved(ledger, found, chosen.cluster, now)
        yield replace(move, why=f"Moved from {unreachable}")
    elif found.reason is not Reason.PROVIDER_SILENT:
        vigil.stranding.add(provider.id)
        yield Stranded(now, found.id, f"Stays in cluster {unreachable}; no other cluster fits yet")


def _is_revoked(ledger: Ledger, cluster: ClusterId) -> bool:
    """A revoked cluster cannot advertise, and the revocation has decided about its reservations."""
    member = ledger.registry.members.get(member_id(Role.CLUSTER, cluster))
    return member is not None and member.standing is Standing.REVOKED


def _stranding(ledger: Ledger) -> set[ClusterId]:
    """Restores the set after a restart: the reason is part of the record."""
    if not any(ledger.tally[phase, Reason.PROVIDER_SILENT] for phase in Phase):
        return set()
    found = ledger.reservations.values()
    return {one.target for one in found if one.target and one.reason is Reason.PROVIDER_SILENT}
