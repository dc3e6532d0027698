"""Providers that fell silent: what they lend moves to others, once they have been silent for long.

A command as in `commands`, for the writer to run about once a second. A look at the whole fleet is one pass
over a column, so nothing has to be kept in order for it while advertisements and reservations come in. How
long a provider is silent counts only while this broker was there to hear it: that is what `Vigil` is for.
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
"""Reservations decided on at a time: a few milliseconds, in which nobody else is answered."""

TRY_AGAIN = timedelta(seconds=10)
"""How soon those that fitted nowhere are tried again."""

LOOK_EVERY = timedelta(seconds=0.5)
LONGEST_GAP = timedelta(seconds=10)
"""Between two looks. If it was longer, the broker slept or its clock jumped, and nobody else was silent."""


class Vigil:
    """What one broker remembers of the silence around it."""

    def __init__(self, lost_after: timedelta, ledger: Ledger, now: datetime) -> None:
        self._lost_after = lost_after
        """Zero gives nobody up."""
        self._since = self._looked_at = self._again_at = now
        self._lost: set[ClusterId] = set()
        self._untried: deque[ReservationId] = deque()
        self.stranding = _stranding(ledger)
        """Clusters on which a reservation may be marked as stranded."""

    @property
    def is_busy(self) -> bool:
        """Whether there is more to do at once."""
        return bool(self._untried)

    def begin(self, now: datetime) -> bool:
        """Whether it is time for a look; if so, it begins."""
        gap = now - self._looked_at
        if timedelta() <= gap < LOOK_EVERY:
            return False
        if not timedelta() <= gap <= LONGEST_GAP:
            self._since = now
        self._looked_at = now
        return True

    def look(self, ledger: Ledger, now: datetime) -> set[ClusterId]:
        """Find who is given up now, and line up what there is to try; returns those that were not before."""
        before, self._lost = self._lost, self._silent(ledger, now)
        given_up = self._lost - before
        due = self._lost if not self._untried and now >= self._again_at else given_up
        for cluster in sorted(due):
            self._untried.extend(found.id for found in ledger.lent_by(cluster))
        if self._untried:
            self._again_at = now + TRY_AGAIN
        return given_up

    def take(self, ledger: Ledger) -> Reservation | None:
        """One that is still where nobody is heard; None if there is no more."""
        while self._untried:
            found = ledger.reservations.get(self._untried.popleft())
            if found is None or not found.is_live or found.target not in ledger.clusters:
                continue
            if found.target in self._lost:
                return found
        return None

    def _silent(self, ledger: Ledger, now: datetime) -> set[ClusterId]:
        """Who lends something, and has been stale for too long while this broker could hear."""
        fleet = ledger.fleet
        if not len(fleet) or int(fleet.valid_until.max()) <= micros(now):
            self._since = now  # where nobody is heard at all, it may be us who are cut off
        if not self._lost_after or now - self._since < self._lost_after:
            return set()
        rows = np.flatnonzero(fleet.valid_until <= micros(now - self._lost_after))
        found = (fleet.ids[row] for row in rows.tolist())
        return {one for one in found if ledger.lent_count(one) and not _is_revoked(ledger, one)}


def leave(ledger: Ledger, vigil: Vigil, now: datetime) -> Command[list[Cluster]]:
    """Move what silent providers lend; returns those that are given up from now on.

    What fits nowhere else stays where it is, for the provider may come back, and is tried again.
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
        if provider.is_stale(now):  # it may have come back since the last look
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
    """Why it fits nowhere is not in its message: that changes all the time, and `explain` has it."""
    since = instants.time_of_day(provider.received_at, now)
    unheard = f"{provider.id}, which has not been heard since {since}"
    chosen = decision.choose(quotas.question_of(ledger, found, now), ledger.fleet)
    if chosen is not None:
        move = commands.moved(ledger, found, chosen.cluster, now)
        yield replace(move, why=f"Moved from {unheard}")
    elif found.reason is not Reason.PROVIDER_SILENT:
        vigil.stranding.add(provider.id)
        yield Stranded(now, found.id, f"Kept in cluster {unheard}; no other fits yet")


def _is_revoked(ledger: Ledger, cluster: ClusterId) -> bool:
    """Then it is silent because it may not speak: an administrator has said what becomes of its loans."""
    member = ledger.registry.members.get(member_id(Role.CLUSTER, cluster))
    return member is not None and member.standing is Standing.REVOKED


def _stranding(ledger: Ledger) -> set[ClusterId]:
    """The marks are part of the records, so a restart finds them there."""
    if not any(ledger.tally[phase, Reason.PROVIDER_SILENT] for phase in Phase):
        return set()
    found = ledger.reservations.values()
    return {one.target for one in found if one.target and one.reason is Reason.PROVIDER_SILENT}
