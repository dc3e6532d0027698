"""The ledger: the broker's state of clusters, reservations, members and limits.

`apply` is the only mutation. The reserved amount of a cluster is the sum of its live reservations;
it is maintained here and never stored, so a lost or rewritten advertisement cannot lose a lock. The
ledger does no I/O and reads no clock: replaying the same events yields the same ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Self

from msgspec.structs import replace

from kubelend.core import transitions
from kubelend.core.accounts import Accounts
from kubelend.core.catalogue import Catalogue
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
    Removed,
    Requested,
    ReservationEvent,
    Uncordoned,
)
from kubelend.core.fleet import Fleet
from kubelend.core.holds import Holds
from kubelend.core.instants import micros
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import (
    Cluster,
    ClusterId,
    RequestKey,
    Reservation,
    ReservationId,
)
from kubelend.core.queues import Queue
from kubelend.core.records import Records
from kubelend.core.registry import Registry
from kubelend.core.resources import Resources
from kubelend.core.rulebook import Rulebook
from kubelend.core.schedules import Schedule


class Ledger:
    """Clusters, reservations and the indexes derived from them."""

    def __init__(self) -> None:
        self.revision = 0
        """Number of applied events; monotonic, so it orders all visible states."""
        self.fleet = Fleet()
        self.registry = Registry()
        self.rulebook = Rulebook()
        self.accounts = Accounts()
        self.freed: set[ClusterId] = set()
        """Clusters on which a waiting request may fit now; cleared by `waiting.serve_queue`."""
        self.shifted: set[ClusterId] = set()
        """Requesters with a changed quota usage, whose waiting requests must be retried; cleared by
        `waiting.serve_queue`.
        """
        self.horizon = 0
        """The highest revision among evicted records, as etcd's compacted revision: a watcher that
        has seen it has missed nothing.
        """
        self._clusters: dict[ClusterId, Cluster] = {}
        self._catalogue = Catalogue()
        self._holds = Holds()
        self._queue = Queue(self.reservations)
        self._schedule = Schedule(self.reservations, self.accounts)
        self._minute = 0

    @classmethod
    def restore(cls, records: Records) -> Self:
        """Rebuilds the ledger from stored records."""
        ledger = cls()
        ledger.registry = Registry(records.members, records.tokens)
        reservations = records.in_order()
        ledger._take_over(reservations)
        for limits in records.limits:
            ledger._put_limits(limits)
        for cluster in sorted(records.clusters, key=attrgetter("id")):
            ledger._put_cluster(cluster)
        for reservation in reservations:
            if reservation.phase is Phase.PENDING:
                ledger._queue.put(None, reservation, ledger.fleet)
        ledger.revision = ledger.horizon = records.revision
        ledger.freed.clear()
        ledger.shifted.clear()
        return ledger

    # -- mutation

    def apply(self, event: Event) -> Change:
        """Applies an event; returns the change that a store has to persist."""
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
                raise TypeError(f"unknown event: {type(event).__name__}")
        return change

    def adopt(self, changes: Iterable[Change], revision: int) -> None:
        """Applies changes that the leader's `apply` returned.

        A deleted record may be unknown here: its object may have been deleted before it was replicated.
        """
        for change in changes:
            match change:
                case Cluster():
                    self._put_cluster(change)
                case Reservation():
                    self._put_reservation(self._same(change), change)
                case Archived() if change.reservation in self.reservations:
                    self._forget(change.reservation)
                case Dropped() if change.cluster in self._clusters:
                    self._drop(change.cluster)
                case Limits():
                    self._put_limits(change)
                case Erased(kind="limits"):
                    self._put_limits(Limits(ClusterId(change.id)))
                case Member() | Token() | Erased():
                    self.registry.adopt(change)
        self.revision = revision
        self.freed.clear()
        self.shifted.clear()

    # -- queries

    @property
    def clusters(self) -> Mapping[ClusterId, Cluster]:
        return self._clusters

    @property
    def reservations(self) -> Mapping[ReservationId, Reservation]:
        return self._catalogue.by_id

    @property
    def tally(self) -> Counter[tuple[Phase, Reason]]:
        """Number of reservations by phase and reason."""
        return self._catalogue.tally

    def limits(self, cluster: ClusterId) -> Limits:
        """The limits of a cluster; empty limits if none are set."""
        return self.rulebook.limits.get(cluster) or Limits(cluster)

    def cluster(self, cluster: ClusterId) -> Cluster:
        try:
            return self._clusters[cluster]
        except KeyError:
            raise NotFound(
                f"no cluster {cluster!r}", hint="the cluster has not advertised yet"
            ) from None

    def reservation(self, reservation: ReservationId) -> Reservation:
        try:
            return self._catalogue.by_id[reservation]
        except KeyError:
            raise no_reservation(reservation) from None

    def reserved(self, cluster: ClusterId) -> Resources:
        """The sum of the live reservations on a cluster."""
        return self._holds.total(cluster)

    def available(self, cluster: ClusterId) -> Resources:
        """Allocatable - allocated - reserved; negative if the cluster is overcommitted."""
        return self._clusters[cluster].ceiling - self.reserved(cluster)

    def by_key(self, requester: ClusterId, key: RequestKey) -> Reservation | None:
        return self._catalogue.by_key(requester, key)

    def touching(self, cluster: ClusterId) -> Iterator[Reservation]:
        """Reservations with this cluster as requester, provider or previous provider, unordered."""
        return self._catalogue.touching(cluster)

    def lent_by(self, cluster: ClusterId) -> list[Reservation]:
        """The live reservations on a cluster, oldest first."""
        by_id, lent = self._catalogue.by_id, self._holds.on(cluster)
        return sorted((by_id[found] for found in lent), key=attrgetter("ticket")) if lent else []

    def lent_count(self, cluster: ClusterId) -> int:
        return len(self._holds.on(cluster))

    def waiting(self) -> list[Reservation]:
        """Waiting requests in the order in which they are served: by priority, then by age."""
        return self._queue.in_order()

    def earmarked(self, cluster: ClusterId) -> Reservation | None:
        """The waiting request for which a cluster is nominated."""
        return self._queue.earmarked(cluster)

    @property
    def waiting_count(self) -> int:
        return len(self._queue)

    def overdue(self, now: datetime) -> Iterator[Reservation]:
        """Reservations whose deadline has passed, earliest first. End each before advancing the
        iterator.
        """
        return self._schedule.overdue(now)

    def finished_before(self, moment: datetime) -> Iterator[Reservation]:
        """Reservations finished before `moment`. Evict each before advancing the iterator."""
        return self._schedule.finished_before(moment)

    def next_deadline(self) -> datetime | None:
        """The earliest time at which a reservation ends or a cluster opens for a waiting request."""
        due = self._schedule.next()
        bounds = self.fleet.bounds
        if bounds is None or not self._queue or bounds.openings.opens_at is None:
            return due
        return bounds.openings.opens_at if due is None else min(due, bounds.openings.opens_at)

    def tick(self, now: datetime) -> None:
        """Updates `capacity_freed` and `quota_changed` for time-based changes: opening hours and
        daily budgets.
        """
        if not self._queue:
            return
        self.freed.update(self.fleet.opened(micros(now)))
        minute = micros(now) // 60_000_000
        if minute != self._minute:
            self._minute = minute
            self.shifted.update(self.accounts.waiting_for_money())

    # -- event handlers

    def _advertised(self, event: Advertised) -> Change:
        known = self._clusters.get(event.advertisement.cluster)
        return self._put_cluster(
            Cluster(
                advertisement=event.advertisement,
                received_at=event.at,
                valid_until=event.valid_until,
                cordon=None if known is None else known.cordon,
                certificate_until=event.certificate_until,
                revision=self.revision,
            )
        )

    def _cordoned(self, cluster: ClusterId, why: str | None) -> Change:
        return self._put_cluster(replace(self.cluster(cluster), cordon=why, revision=self.revision))

    def _removed(self, event: Removed) -> Change:
        self._drop(event.cluster)
        return Dropped(event.cluster)

    def _requested(self, event: Requested) -> Change:
        born = replace(event.reservation, ticket=self.revision, revision=self.revision)
        return self._put_reservation(None, born)

    def _evolved(self, event: ReservationEvent) -> Change:
        before = self.reservation(event.reservation)
        return self._put_reservation(before, transitions.evolve(before, event, self.revision))

    def _limited(self, event: LimitsEvent) -> Change:
        before = self.limits(event.cluster)
        return self._put_limits(transitions.limited(before, event, self.revision))

    def _forgotten(self, event: Forgotten) -> Change:
        self._forget(event.reservation)
        return Archived(event.reservation)

    # -- indexes

    def _drop(self, cluster: ClusterId) -> None:
        del self._clusters[cluster]
        self.fleet.remove(cluster)
        self.fleet.loans.ignore(cluster)
        self.rulebook.drop(cluster)
        self.freed.discard(cluster)
        self._queue.drop(cluster)

    def _forget(self, reservation: ReservationId) -> None:
        gone = self._catalogue.forget(reservation)
        self.horizon = max(self.horizon, gone.revision)
        self.accounts.forget(gone)

    def _put_limits(self, limits: Limits) -> Change:
        before, cluster = self.limits(limits.cluster), limits.cluster
        change = self.rulebook.put(limits)
        if before.quota != limits.quota:
            self.accounts.open(cluster, limits.quota, self.touching(cluster))
            self.shifted.add(cluster)
        if before.policy != limits.policy and cluster in self._clusters:
            self._write(self._clusters[cluster])
            self.freed.add(cluster)
        return change

    def _put_cluster(self, cluster: Cluster) -> Cluster:
        before = self._clusters.get(cluster.id)
        self._clusters[cluster.id] = cluster
        if before is not None and cluster.offers_the_same_as(before):
            self.fleet.renew(cluster)
            if before.is_stale(cluster.received_at):
                self.freed.add(cluster.id)
        else:
            self._write(cluster)
            self.freed.add(cluster.id)
        return cluster

    def _write(self, cluster: Cluster) -> None:
        """Writes the row of a cluster in the fleet, including its effective policy."""
        self.fleet.put(cluster, self.available(cluster.id).clamped())
        holds = self.rulebook.judge(cluster)
        self.fleet.bind(cluster, holds)
        self._withhold(cluster.id)
        if holds is not None and holds.max_per_requester:
            self.fleet.loans.watch(cluster.id, self.lent_by(cluster.id))
        else:
            self.fleet.loans.ignore(cluster.id)

    def _withhold(self, cluster: ClusterId) -> None:
        holds = self.rulebook.lending(cluster)
        if holds is not None:
            available, reserved = self.available(cluster).clamped(), self.reserved(cluster)
            self.fleet.withhold(cluster, holds, available, reserved)

    def _take_over(self, reservations: Sequence[Reservation]) -> None:
        """Runs before clusters are loaded, so that each row is written with its reserved amount."""
        self._catalogue.fill(reservations)
        self._schedule.fill(reservations)
        for reservation in reservations:
            if reservation.is_live:
                self._move_hold(None, reservation)

    def _put_reservation(self, before: Reservation | None, after: Reservation) -> Reservation:
        self._catalogue.put(before, after)
        self._schedule.put(before, after)
        self._move_hold(before, after)
        unmarked = self._queue.put(before, after, self.fleet)
        if unmarked is not None:
            self.freed.add(unmarked)
        if self.accounts.by_requester and self.accounts.move(before, after):
            self.shifted.add(after.requester)
        return after

    def _move_hold(self, before: Reservation | None, after: Reservation) -> None:
        held_on = before.target if before is not None and before.is_live else None
        holds_on = after.target if after.is_live else None
        if held_on == holds_on:
            return
        if self.fleet.loans.watched:
            self._move_loan(after, held_on, holds_on)
        if held_on is not None:
            self._holds.remove(held_on, after)
            self._count_free(held_on, after.request.resources)
            self.freed.add(held_on)
        if holds_on is not None:
            self._holds.add(holds_on, after)
            self._count_free(holds_on, after.request.resources)

    def _move_loan(
        self, found: Reservation, held_on: ClusterId | None, holds_on: ClusterId | None
    ) -> None:
        if held_on is not None:
            self.fleet.loans.remove(held_on, found)
        if holds_on is not None:
            self.fleet.loans.add(holds_on, found)
            if holds_on in self.fleet.loans.watched:
                self.shifted.add(found.requester)  # its remaining cap on that provider changed

    def _count_free(self, cluster: ClusterId, changed: Resources) -> None:
        if cluster in self._clusters:
            self.fleet.set_free(cluster, self.available(cluster).clamped(), changed)
            if self.fleet.bounds is not None:
                self._withhold(cluster)

    def _same(self, news: Reservation) -> Reservation | None:
        """The known version of a replicated reservation.

        A different reservation that had the same name is released and evicted first.
        """
        known = self.reservations.get(news.id)
        if known is None or known.ticket == news.ticket:
            return known
        self._put_reservation(known, replace(known, phase=Phase.RELEASED, earmark=None))
        self._forget(known.id)
        return None
