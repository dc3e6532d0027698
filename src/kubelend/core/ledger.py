"""Who has promised what to whom: the state of the broker, changed by events alone.

`apply` is the only mutation. What is reserved on a cluster is the sum of the live reservations on it,
kept up to date here and never stored, so a lost or rewritten advertisement cannot lose a lock. The
ledger neither reads a clock nor does I/O: replaying the same events gives the same ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from heapq import heapify, heappop, heappush
from typing import Self

from msgspec.structs import replace

from kubelend.core import transitions
from kubelend.core.errors import NotFound, no_reservation
from kubelend.core.events import (
    Advertised,
    Archived,
    Change,
    Cordoned,
    Dropped,
    Erased,
    Event,
    Forgotten,
    LimitsEvent,
    MembershipEvent,
    PolicySet,
    QuotaSet,
    Removed,
    Requested,
    ReservationEvent,
    Uncordoned,
)
from kubelend.core.fleet import Fleet
from kubelend.core.journal import Subject
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.limits import Limits
from kubelend.core.models import (
    Cluster,
    ClusterId,
    RequestKey,
    Reservation,
    ReservationId,
)
from kubelend.core.records import Records
from kubelend.core.registry import Registry
from kubelend.core.resources import NOTHING, Resources


class Ledger:
    """Clusters, reservations, and what follows from them."""

    def __init__(self) -> None:
        self.revision = 0
        """Counts events; never goes back, so it orders everything that was ever visible."""
        self.fleet = Fleet()
        self.registry = Registry()
        self.freed: set[ClusterId] = set()
        """Clusters on which a waiter may now fit; whoever serves the waiters empties it."""
        self.horizon = 0
        """Whoever has seen this revision has missed nothing that is forgotten by now."""
        self.tally: Counter[tuple[Phase, Reason]] = Counter()
        """How many reservations are in each phase, and why."""
        self._clusters: dict[ClusterId, Cluster] = {}
        self._limits: dict[ClusterId, Limits] = {}
        self._reservations: dict[ReservationId, Reservation] = {}
        self._reserved: dict[ClusterId, Resources] = {}
        self._lent: dict[ClusterId, dict[ReservationId, None]] = {}
        self._by_cluster: dict[ClusterId, dict[ReservationId, None]] = {}
        self._keys: dict[tuple[ClusterId, RequestKey], ReservationId] = {}
        self._waiting: dict[ReservationId, None] = {}
        self._earmarked: dict[ClusterId, ReservationId] = {}
        self._deadlines: list[tuple[datetime, ReservationId]] = []
        self._finished: list[tuple[datetime, ReservationId]] = []

    @classmethod
    def restore(cls, records: Records) -> Self:
        """The ledger that these records were written from."""
        ledger = cls()
        ledger.registry = Registry(records.members, records.tokens)
        for limits in records.limits:
            ledger._put_limits(limits)
        for cluster in sorted(records.clusters, key=lambda cluster: cluster.id):
            ledger._put_cluster(cluster)
        for reservation in sorted(records.reservations, key=lambda reservation: reservation.ticket):
            ledger._put_reservation(None, reservation)
        ledger.revision = ledger.horizon = records.revision
        ledger.freed.clear()
        return ledger

    # -- the only road for changes

    def apply(self, event: Event) -> Change:
        """Take an event in, and say what a store has to keep of it."""
        self.revision += 1
        match event:
            case Advertised():
                change = self._advertised(event)
            case Cordoned():
                change = self._cordoned(event.cluster, event.why)
            case Uncordoned():
                change = self._cordoned(event.cluster, None)
            case Removed():
                change = self._removed(event)
            case Requested():
                change = self._requested(event)
            case Forgotten():
                change = self._forgotten(event)
            case ReservationEvent():
                change = self._evolved(event)
            case MembershipEvent():
                change = self.registry.apply(event, self.revision)
            case LimitsEvent():
                change = self._limited(event)
            case _:
                raise TypeError(f"the ledger knows no {type(event).__name__}")
        return change

    def before(self, event: Event) -> Subject | None:
        """The record that an event is about to change; None if there is none yet."""
        match event:
            case Requested():
                return None
            case ReservationEvent():
                return self._reservations.get(event.reservation)
            case Advertised():
                return self._clusters.get(event.advertisement.cluster)
            case Cordoned() | Uncordoned() | Removed():
                return self._clusters.get(event.cluster)
            case MembershipEvent():
                return self.registry.before(event)
            case LimitsEvent():
                return self._limits.get(event.cluster)
        raise TypeError(f"the ledger knows no {type(event).__name__}")

    # -- questions

    @property
    def clusters(self) -> Mapping[ClusterId, Cluster]:
        return self._clusters

    @property
    def reservations(self) -> Mapping[ReservationId, Reservation]:
        return self._reservations

    def limits(self, cluster: ClusterId) -> Limits:
        """What an administrator has set for a cluster; no limits if nothing."""
        return self._limits.get(cluster) or Limits(cluster)

    def cluster(self, cluster: ClusterId) -> Cluster:
        try:
            return self._clusters[cluster]
        except KeyError:
            raise NotFound(f"no cluster {cluster!r}", hint="it has not advertised yet") from None

    def reservation(self, reservation: ReservationId) -> Reservation:
        try:
            return self._reservations[reservation]
        except KeyError:
            raise no_reservation(reservation) from None

    def reserved(self, cluster: ClusterId) -> Resources:
        """The sum of the live reservations on a cluster."""
        return self._reserved.get(cluster, NOTHING)

    def available(self, cluster: ClusterId) -> Resources:
        """Allocatable - allocated - reserved; below zero where a cluster filled up under its promises."""
        return self._clusters[cluster].ceiling - self.reserved(cluster)

    def by_key(self, requester: ClusterId, key: RequestKey) -> Reservation | None:
        found = self._keys.get((requester, key))
        return None if found is None else self._reservations[found]

    def touching(self, cluster: ClusterId) -> Iterator[Reservation]:
        """What a cluster asked for, lends or lent, in no particular order."""
        return (self._reservations[found] for found in self._by_cluster.get(cluster, ()))

    def lent_by(self, cluster: ClusterId) -> list[Reservation]:
        """The live reservations on a cluster, oldest first."""
        lent = (self._reservations[found] for found in self._lent.get(cluster, ()))
        return sorted(lent, key=lambda found: found.ticket)

    def lent_count(self, cluster: ClusterId) -> int:
        return len(self._lent.get(cluster, ()))

    def waiting(self) -> list[Reservation]:
        """Who waits, in the order in which they are served: by priority, then by age."""
        waiters = [self._reservations[found] for found in self._waiting]
        return sorted(waiters, key=lambda waiter: (-waiter.request.priority, waiter.ticket))

    def earmarked(self, cluster: ClusterId) -> Reservation | None:
        """The waiter that a cluster is kept for."""
        found = self._earmarked.get(cluster)
        return None if found is None else self._reservations[found]

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def overdue(self, now: datetime) -> Iterator[Reservation]:
        """Whose deadline has passed, earliest first. Each must be ended before the next is asked for."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, found = self._deadlines[0]
            reservation = self._reservations.get(found)
            if reservation is not None and reservation.deadline == deadline:
                yield reservation
            else:
                heappop(self._deadlines)

    def finished_before(self, moment: datetime) -> Iterator[Reservation]:
        """Who finished before a moment. Each must be forgotten before the next is asked for."""
        while self._finished and self._finished[0][0] <= moment:
            reservation = self._reservations.get(self._finished[0][1])
            if reservation is not None:
                yield reservation
            else:
                heappop(self._finished)

    def next_deadline(self) -> datetime | None:
        """No reservation ends by itself before this moment."""
        return self._deadlines[0][0] if self._deadlines else None

    # -- what each event does

    def _advertised(self, event: Advertised) -> Change:
        known = self._clusters.get(event.advertisement.cluster)
        return self._put_cluster(
            Cluster(
                advertisement=event.advertisement,
                received_at=event.at,
                valid_until=event.valid_until,
                cordon=None if known is None else known.cordon,
                revision=self.revision,
            )
        )

    def _cordoned(self, cluster: ClusterId, why: str | None) -> Change:
        return self._put_cluster(replace(self.cluster(cluster), cordon=why, revision=self.revision))

    def _removed(self, event: Removed) -> Change:
        del self._clusters[event.cluster]
        self.fleet.remove(event.cluster)
        self.freed.discard(event.cluster)
        self._earmarked.pop(event.cluster, None)
        return Dropped(event.cluster)

    def _requested(self, event: Requested) -> Change:
        born = replace(event.reservation, ticket=self.revision, revision=self.revision)
        return self._put_reservation(None, born)

    def _evolved(self, event: ReservationEvent) -> Change:
        before = self.reservation(event.reservation)
        return self._put_reservation(before, transitions.evolve(before, event, self.revision))

    def _limited(self, event: LimitsEvent) -> Change:
        before = self.limits(event.cluster)
        match event:
            case PolicySet():
                after = replace(before, policy=event.policy, revision=self.revision)
            case QuotaSet():
                after = replace(before, quota=event.quota, revision=self.revision)
            case _:
                raise TypeError(f"the ledger knows no {type(event).__name__}")
        return self._put_limits(after)

    def _forgotten(self, event: Forgotten) -> Change:
        gone = self._reservations.pop(event.reservation)
        self.tally[gone.phase, gone.reason] -= 1
        self.horizon = max(self.horizon, gone.revision)
        for cluster in _touched(gone):
            self._by_cluster[cluster].pop(gone.id, None)
            if not self._by_cluster[cluster]:
                del self._by_cluster[cluster]
        if gone.request.key is not None:
            del self._keys[gone.requester, gone.request.key]
        return Archived(gone.id)

    # -- indexes

    def _put_limits(self, limits: Limits) -> Change:
        if limits.policy is None and limits.quota is None:
            self._limits.pop(limits.cluster, None)
            return Erased("limits", limits.cluster)
        self._limits[limits.cluster] = limits
        return limits

    def _put_cluster(self, cluster: Cluster) -> Cluster:
        before = self._clusters.get(cluster.id)
        self._clusters[cluster.id] = cluster
        self.fleet.put(cluster, self.available(cluster.id).clamped())
        if before is None or _lends_otherwise(before, cluster):
            self.freed.add(cluster.id)
        return cluster

    def _put_reservation(self, before: Reservation | None, after: Reservation) -> Reservation:
        self._reservations[after.id] = after
        self.tally[after.phase, after.reason] += 1
        if before is not None:
            self.tally[before.phase, before.reason] -= 1
        for cluster in _touched(after):
            self._by_cluster.setdefault(cluster, {})[after.id] = None
        if after.request.key is not None:
            self._keys[after.requester, after.request.key] = after.id
        self._queue(after)
        self._schedule(before, after)
        self._move_hold(before, after)
        self._move_earmark(before, after)
        return after

    def _queue(self, after: Reservation) -> None:
        if after.phase is Phase.PENDING:
            self._waiting[after.id] = None
        else:
            self._waiting.pop(after.id, None)

    def _schedule(self, before: Reservation | None, after: Reservation) -> None:
        deadline = after.deadline
        if deadline is not None and (before is None or before.deadline != deadline):
            heappush(self._deadlines, (deadline, after.id))
            self._forget_old_deadlines()
        if after.phase in FINAL and after.finished_at is not None:
            heappush(self._finished, (after.finished_at, after.id))

    def _forget_old_deadlines(self) -> None:
        """A lease for years that is given back or renewed today must not stay in line for years."""
        if len(self._deadlines) <= 2 * len(self._reservations) + 64:
            return
        found = self._reservations.values()
        self._deadlines = [(one.deadline, one.id) for one in found if one.deadline is not None]
        heapify(self._deadlines)

    def _move_hold(self, before: Reservation | None, after: Reservation) -> None:
        held_on = before.target if before is not None and before.is_live else None
        holds_on = after.target if after.is_live else None
        if held_on == holds_on:
            return
        if held_on is not None:
            self._lent[held_on].pop(after.id)
            self._set_reserved(held_on, self.reserved(held_on) - after.request.resources)
            self.freed.add(held_on)
        if holds_on is not None:
            self._lent.setdefault(holds_on, {})[after.id] = None
            self._set_reserved(holds_on, self.reserved(holds_on) + after.request.resources)

    def _set_reserved(self, cluster: ClusterId, reserved: Resources) -> None:
        if reserved:
            self._reserved[cluster] = reserved
        else:
            self._reserved.pop(cluster, None)
        if cluster in self._clusters:
            self.fleet.set_free(cluster, self.available(cluster).clamped())

    def _move_earmark(self, before: Reservation | None, after: Reservation) -> None:
        had = None if before is None else before.earmark
        if had == after.earmark:
            return
        if had is not None and self._earmarked.get(had) == after.id:
            del self._earmarked[had]
            self.fleet.set_earmark(had, None)
            self.freed.add(had)
        if after.earmark is not None:
            self._earmarked[after.earmark] = after.id
            self.fleet.set_earmark(after.earmark, (after.request.priority, after.ticket))


def _lends_otherwise(before: Cluster, after: Cluster) -> bool:
    """Whether a waiter may see it in another light. Most advertisements only say "still here"."""
    old, new = before.advertisement, after.advertisement
    return (
        before.is_stale(after.received_at)
        or before.cordon != after.cordon
        or before.ceiling != after.ceiling
        or (old.labels, old.prices) != (new.labels, new.prices)
    )


def _touched(reservation: Reservation) -> set[ClusterId]:
    touched = {reservation.requester, *reservation.left}
    if reservation.target is not None:
        touched.add(reservation.target)
    return touched
