"""The ledger: the broker's state of clusters, reservations, members and limits.

`apply` is the only mutation. The reserved amount of a cluster is the sum of its live reservations;
it is maintained here and never stored, so a lost or rewritten advertisement cannot lose a lock. The
ledger does no I/O and reads no clock: replaying the same events yields the same ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Self

from msgspec.structs import replace

from kubelend.core import transitions
from kubelend.core.accounts import QuotaUsages
from kubelend.core.durations import to_micros
from kubelend.core.errors import NotFound, reservation_not_found
from kubelend.core.events import (
    Advertised,
    Archived,
    Change,
    ClusterDeleted,
    ClusterRemoved,
    Cordoned,
    Event,
    LimitsEvent,
    MembershipEvent,
    RecordDeleted,
    Requested,
    ReservationEvent,
    RetentionExpired,
    TakenOver,
    Uncordoned,
    WorkingSet,
)
from kubelend.core.explanations import ExplainOthers
from kubelend.core.fleet import Fleet
from kubelend.core.indexes import (
    DeadlineHeap,
    HeldResources,
    LimitIndex,
    MemberIndex,
    ReservationIndex,
    WaitQueue,
)
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, ClusterId, Limits, RequestKey, Reservation, ReservationId
from kubelend.core.resources import Resources


class Ledger:
    """Clusters, reservations and the indexes derived from them."""

    def __init__(self) -> None:
        self.revision = 0
        """Number of applied events; monotonic, so it orders all visible states."""
        self.fleet = Fleet()
        self.member_index = MemberIndex()
        self.limit_index = LimitIndex()
        self.quota_usages = QuotaUsages()
        self.capacity_freed: set[ClusterId] = set()
        """Clusters on which a waiting request may fit now; cleared by `waiting.serve_queue`."""
        self.quota_changed: set[ClusterId] = set()
        """Requesters whose waiting requests must be retried; cleared by `waiting.serve_queue`."""
        self.explain_others = ExplainOthers.NAMES
        """What messages of reservations, which their requesters read, say about other clusters."""
        self.compacted_revision = 0
        """The highest revision among evicted records: a watcher that has seen it has missed nothing."""
        self._clusters: dict[ClusterId, Cluster] = {}
        self._reservation_index = ReservationIndex()
        self._held = HeldResources()
        self._wait_queue = WaitQueue(self.reservations)
        self._deadlines = DeadlineHeap(self.reservations, self.quota_usages)
        self._minute = 0

    @classmethod
    def restore(cls, records: WorkingSet) -> Self:
        """Rebuilds the ledger from stored records."""
        ledger = cls()
        ledger.member_index = MemberIndex(records.members, records.tokens)
        reservations = records.reservations_by_age()
        for reservation in reservations:
            # Before the clusters, so that each row is written with its reserved amount.
            ledger._put_reservation(None, reservation)
        for limits in records.limits:
            ledger._put_limits(limits)
        for cluster in sorted(records.clusters, key=attrgetter("id")):
            ledger._put_cluster(cluster)
        for reservation in reservations:
            ledger._wait_queue.put(None, reservation, ledger.fleet)
        ledger.revision = ledger.compacted_revision = records.revision
        ledger.capacity_freed.clear()
        ledger.quota_changed.clear()
        return ledger

    # -- mutation

    def apply(self, event: Event) -> Change:
        """Applies an event; returns the change that a store has to persist."""
        self.revision += 1
        change: Change
        match event:
            case Advertised():
                change = self._advertised(event)
            case Cordoned():
                change = self._cordoned(event.cluster, event.reason)
            case Uncordoned():
                change = self._cordoned(event.cluster, None)
            case ClusterRemoved():
                self._delete_cluster(event.cluster)
                change = ClusterDeleted(event.cluster)
            case Requested() | TakenOver():
                created = {"ticket": self.revision, "revision": self.revision}
                change = self._put_reservation(None, replace(event.reservation, **created))
            case RetentionExpired():
                self._evict(event.reservation)
                change = Archived(event.reservation)
            case ReservationEvent():
                change = self._reservation_event(event)
            case MembershipEvent():
                change = self.member_index.apply(event, self.revision)
            case LimitsEvent():
                before = self.limits(event.cluster)
                after = transitions.apply_limits_event(before, event, self.revision)
                change = self._put_limits(after)
            case _:
                raise TypeError(f"unknown event: {type(event).__name__}")
        return change

    def apply_changes(self, changes: Sequence[Change], revision: int) -> None:
        """Applies changes that the leader's `apply` returned.

        A deleted record may be unknown here: its object may have been deleted before it was replicated.
        """
        for change in changes:
            match change:
                case Cluster():
                    self._put_cluster(change)
                case Reservation():
                    self._put_reservation(self._known_version(change), change)
                case Archived() if change.reservation in self.reservations:
                    self._evict(change.reservation)
                case ClusterDeleted() if change.cluster in self._clusters:
                    self._delete_cluster(change.cluster)
                case Limits():
                    self._put_limits(change)
                case RecordDeleted(kind="limits"):
                    self._put_limits(Limits(ClusterId(change.id)))
                case Member() | Token() | RecordDeleted():
                    self.member_index.apply_change(change)
        self._wait_queue.restore_nominations(changes, self.fleet)
        self.revision = revision
        self.capacity_freed.clear()
        self.quota_changed.clear()

    # -- queries

    @property
    def clusters(self) -> Mapping[ClusterId, Cluster]:
        return self._clusters

    @property
    def reservations(self) -> Mapping[ReservationId, Reservation]:
        return self._reservation_index.by_id

    @property
    def phase_counts(self) -> Counter[tuple[Phase, Reason]]:
        """Number of reservations by phase and reason."""
        return self._reservation_index.phase_counts

    def limits(self, cluster: ClusterId) -> Limits:
        """The limits of a cluster; empty limits if none are set."""
        return self.limit_index.limits.get(cluster) or Limits(cluster)

    def cluster(self, cluster: ClusterId) -> Cluster:
        found = self._clusters.get(cluster)
        if found is None:
            raise NotFound(
                f"no cluster {cluster!r}",
                hint="it has not advertised yet; see `kubelend get clusters`",
            )
        return found

    def reservation(self, reservation: ReservationId) -> Reservation:
        try:
            return self._reservation_index.by_id[reservation]
        except KeyError:
            raise reservation_not_found(reservation) from None

    def reserved(self, cluster: ClusterId) -> Resources:
        """The sum of the live reservations on a cluster."""
        return self._held.total(cluster)

    def available(self, cluster: ClusterId) -> Resources:
        """Allocatable - allocated - reserved; negative if the cluster is overcommitted."""
        return self._clusters[cluster].ceiling - self.reserved(cluster)

    def by_key(self, requester: ClusterId, key: RequestKey) -> Reservation | None:
        return self._reservation_index.by_key(requester, key)

    def by_cluster(self, cluster: ClusterId) -> Iterator[Reservation]:
        """Reservations with this cluster as requester, provider or previous provider, unordered."""
        return self._reservation_index.by_cluster(cluster)

    def lent_by(self, cluster: ClusterId) -> list[Reservation]:
        """The live reservations on a cluster, oldest first."""
        by_id, lent = self._reservation_index.by_id, self._held.reservations_on(cluster)
        return sorted((by_id[found] for found in lent), key=attrgetter("ticket")) if lent else []

    def lent_count(self, cluster: ClusterId) -> int:
        return len(self._held.reservations_on(cluster))

    def waiting(self) -> list[Reservation]:
        """Waiting requests in the order in which they are served: by priority, then by age."""
        return self._wait_queue.in_order()

    def nominated_waiter(self, cluster: ClusterId) -> Reservation | None:
        """The waiting request for which a cluster is nominated."""
        return self._wait_queue.nominated_waiter(cluster)

    @property
    def waiting_count(self) -> int:
        return len(self._wait_queue)

    def waiting_count_of(self, requester: ClusterId) -> int:
        return self._wait_queue.count_of(requester)

    def overdue(self, now: datetime) -> Iterator[Reservation]:
        """Overdue reservations, earliest first. End each before advancing the iterator."""
        return self._deadlines.overdue(now)

    def finished_before(self, moment: datetime) -> Iterator[Reservation]:
        """Reservations finished before `moment`. Evict each before advancing the iterator."""
        return self._deadlines.finished_before(moment)

    def next_deadline(self) -> datetime | None:
        """The earliest time at which a reservation ends or a cluster opens for a waiting request."""
        bounds = self.fleet.policy_columns
        opens = bounds.opening_hours.opens_at if bounds is not None and self._wait_queue else None
        times = (self._deadlines.next_deadline(), opens)
        return min((time for time in times if time is not None), default=None)

    def tick(self, now: datetime) -> None:
        """Updates `capacity_freed` and `quota_changed` for opening hours and daily budgets."""
        if not self._wait_queue:
            return
        self.capacity_freed.update(self.fleet.newly_opened(to_micros(now)))
        minute = to_micros(now) // 60_000_000
        if minute != self._minute:
            self._minute = minute
            self.quota_changed.update(self.quota_usages.waiting_on_budget())

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

    def _cordoned(self, cluster: ClusterId, reason: str | None) -> Change:
        return self._put_cluster(
            replace(self.cluster(cluster), cordon=reason, revision=self.revision)
        )

    def _reservation_event(self, event: ReservationEvent) -> Change:
        before = self.reservation(event.reservation)
        return self._put_reservation(
            before, transitions.apply_reservation_event(before, event, self.revision)
        )

    # -- indexes

    def _delete_cluster(self, cluster: ClusterId) -> None:
        del self._clusters[cluster]
        self.fleet.remove(cluster)
        self.fleet.lent_by_requester.untrack(cluster)
        self.limit_index.remove_provider(cluster)
        self.capacity_freed.discard(cluster)
        self._wait_queue.remove_cluster(cluster)

    def _evict(self, reservation: ReservationId) -> None:
        gone = self._reservation_index.remove(reservation)
        self.compacted_revision = max(self.compacted_revision, gone.revision)
        self.quota_usages.remove(gone)

    def _put_limits(self, limits: Limits) -> Change:
        before, cluster = self.limits(limits.cluster), limits.cluster
        change = self.limit_index.put(limits)
        if before.quota != limits.quota:
            self.quota_usages.reset(cluster, limits.quota, self.by_cluster(cluster))
            self.quota_changed.add(cluster)
        if before.policy != limits.policy and cluster in self._clusters:
            self._write_fleet_row(self._clusters[cluster])
            self.capacity_freed.add(cluster)
        return change

    def _put_cluster(self, cluster: Cluster) -> Cluster:
        before = self._clusters.get(cluster.id)
        self._clusters[cluster.id] = cluster
        if before is not None and cluster.has_same_offer(before):
            self.fleet.renew_validity(cluster)
            if before.is_stale(cluster.received_at):
                self.capacity_freed.add(cluster.id)
        else:
            self._write_fleet_row(cluster)
            self.capacity_freed.add(cluster.id)
        return cluster

    def _write_fleet_row(self, cluster: Cluster) -> None:
        """Writes the row of a cluster in the fleet, including its effective policy."""
        self.fleet.put(cluster, self.available(cluster.id).clamped())
        holds = self.limit_index.recompute(cluster)
        self.fleet.set_policy(cluster, holds)
        self._apply_policy(cluster.id)
        if holds is not None and holds.max_per_requester:
            self.fleet.lent_by_requester.track(cluster.id, self.lent_by(cluster.id))
        else:
            self.fleet.lent_by_requester.untrack(cluster.id)

    def _apply_policy(self, cluster: ClusterId) -> None:
        holds = self.limit_index.effective_policy(cluster)
        if holds is not None:
            available, reserved = self.available(cluster).clamped(), self.reserved(cluster)
            self.fleet.apply_policy(cluster, holds, available, reserved)

    def _put_reservation(self, before: Reservation | None, after: Reservation) -> Reservation:
        self._reservation_index.put(before, after)
        self._deadlines.put(before, after)
        self._move_hold(before, after)
        unmarked = self._wait_queue.put(before, after, self.fleet)
        if unmarked is not None:
            self.capacity_freed.add(unmarked)
        if self.quota_usages.by_requester and self.quota_usages.update(before, after):
            self.quota_changed.add(after.requester)
        return after

    def _move_hold(self, before: Reservation | None, after: Reservation) -> None:
        old_provider = before.target if before is not None and before.is_live else None
        new_provider = after.target if after.is_live else None
        if old_provider == new_provider:
            return
        lent = self.fleet.lent_by_requester
        if old_provider is not None:
            lent.remove(old_provider, after)
            self._held.remove(old_provider, after)
            self._update_free(old_provider, after.request.resources)
            self.capacity_freed.add(old_provider)
        if new_provider is not None:
            if lent.add(new_provider, after):
                self.quota_changed.add(after.requester)  # its remaining cap there changed
            self._held.add(new_provider, after)
            self._update_free(new_provider, after.request.resources)

    def _update_free(self, cluster: ClusterId, changed: Resources) -> None:
        if cluster in self._clusters:
            self.fleet.set_free(cluster, self.available(cluster).clamped(), changed)
            if self.fleet.policy_columns is not None:
                self._apply_policy(cluster)

    def _known_version(self, news: Reservation) -> Reservation | None:
        """The known version of a replicated reservation.

        A different reservation that had the same name is released and evicted first.
        """
        known = self.reservations.get(news.id)
        if known is None or known.ticket == news.ticket:
            return known
        self._put_reservation(known, replace(known, phase=Phase.RELEASED, nominated_cluster=None))
        self._evict(known.id)
        return None
