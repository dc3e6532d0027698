"""Indexes of the ledger: deadlines, reservations by cluster, held resources, wait queue, limits, members."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from heapq import heapify, heappop, heappush, heapreplace

from msgspec.structs import replace

from kubelend.core import lending
from kubelend.core.accounts import QuotaUsages
from kubelend.core.errors import NotFound, Revoked
from kubelend.core.events import (
    Change,
    MemberChanged,
    MemberRemoved,
    MembershipEvent,
    RecordDeleted,
    TokenChanged,
    TokenRemoved,
)
from kubelend.core.fleet import Fleet
from kubelend.core.lending import EffectivePolicy
from kubelend.core.lifecycle import FINAL, Phase, Reason, Role
from kubelend.core.members import Member, MemberId, MembershipStatus, Token, TokenId, member_id
from kubelend.core.models import Cluster, ClusterId, Limits, RequestKey, Reservation, ReservationId
from kubelend.core.resources import NOTHING, Resources


class DeadlineHeap:
    """Heaps of deadlines and of finished reservations."""

    def __init__(
        self, reservations: Mapping[ReservationId, Reservation], accounts: QuotaUsages
    ) -> None:
        self._reservations = reservations
        self._quota_usages = accounts
        self._deadlines: list[tuple[datetime, ReservationId]] = []
        self._finished: list[tuple[datetime, ReservationId]] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    def put(self, before: Reservation | None, after: Reservation) -> None:
        deadline = after.deadline
        if deadline is not None and (before is None or before.deadline != deadline):
            heappush(self._deadlines, (deadline, after.id))
            self._compact()
        if after.phase in FINAL and after.finished_at is not None:
            heappush(self._finished, (after.finished_at, after.id))

    def next_deadline(self) -> datetime | None:
        """The earliest deadline, which may be outdated."""
        return self._deadlines[0][0] if self._deadlines else None

    def overdue(self, now: datetime) -> Iterator[Reservation]:
        """Overdue reservations, earliest first. End each before advancing the iterator."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, found = self._deadlines[0]
            reservation = self._reservations.get(found)
            if reservation is not None and reservation.deadline == deadline:
                yield reservation
            else:
                heappop(self._deadlines)

    def finished_before(self, moment: datetime) -> Iterator[Reservation]:
        """Reservations finished before `moment`. Evict each before advancing the iterator."""
        while self._finished and self._finished[0][0] <= moment:
            at, found = self._finished[0]
            reservation = self._reservations.get(found)
            finished_at = None if reservation is None else reservation.finished_at
            if reservation is None or finished_at is None or finished_at > at:
                # Already evicted; another reservation may have the same name.
                heappop(self._finished)
                continue
            # A reservation that counts against a day's budget is retained until the day ends.
            until = self._quota_usages.retained_until(reservation)
            if until is not None and until > at:
                heapreplace(self._finished, (until, found))
            else:
                yield reservation

    def _compact(self) -> None:
        """Rebuilds the heap when outdated entries dominate: a long lease that was released or
        renewed would otherwise stay for years.
        """
        if len(self._deadlines) <= 2 * len(self._reservations) + 64:
            return
        found = self._reservations.values()
        self._deadlines = [(one.deadline, one.id) for one in found if one.deadline is not None]
        heapify(self._deadlines)


class ReservationIndex:
    """Reservations by ID, by idempotency key and by cluster."""

    def __init__(self) -> None:
        self.by_id: dict[ReservationId, Reservation] = {}
        self.phase_counts: Counter[tuple[Phase, Reason]] = Counter()
        """Number of reservations by phase and reason."""
        self._by_key: dict[tuple[ClusterId, RequestKey], ReservationId] = {}
        self._by_cluster: defaultdict[ClusterId, dict[ReservationId, None]] = defaultdict(dict)

    def by_key(self, requester: ClusterId, key: RequestKey) -> Reservation | None:
        found = self._by_key.get((requester, key))
        return None if found is None else self.by_id[found]

    def by_cluster(self, cluster: ClusterId) -> Iterator[Reservation]:
        """Reservations with this cluster as requester, provider or previous provider, unordered."""
        return (self.by_id[found] for found in self._by_cluster.get(cluster, ()))

    def put(self, before: Reservation | None, after: Reservation) -> None:
        self.by_id[after.id] = after
        self.phase_counts[after.phase, after.reason] += 1
        self._index(after)
        if before is not None:
            self.phase_counts[before.phase, before.reason] -= 1
        elif after.request.key is not None:
            self._by_key[after.requester, after.request.key] = after.id

    def remove(self, reservation: ReservationId) -> Reservation:
        gone = self.by_id.pop(reservation)
        self.phase_counts[gone.phase, gone.reason] -= 1
        for cluster in gone.involved_clusters:
            self._by_cluster[cluster].pop(gone.id, None)
            if not self._by_cluster[cluster]:
                del self._by_cluster[cluster]
        if gone.request.key is not None:
            key = gone.requester, gone.request.key
            if self._by_key.get(key) == gone.id:  # otherwise the key belongs to a newer reservation
                del self._by_key[key]
        return gone

    def _index(self, reservation: Reservation) -> None:
        found = reservation.id
        self._by_cluster[reservation.requester][found] = None
        if reservation.target is not None:
            self._by_cluster[reservation.target][found] = None
        for cluster in reservation.left:
            self._by_cluster[cluster][found] = None


class HeldResources:
    """Resources held on each cluster by live reservations."""

    def __init__(self) -> None:
        self._sums: dict[ClusterId, Resources] = {}
        self._lent: dict[ClusterId, dict[ReservationId, None]] = {}

    def total(self, cluster: ClusterId) -> Resources:
        return self._sums.get(cluster, NOTHING)

    def reservations_on(self, cluster: ClusterId) -> Collection[ReservationId]:
        """Unordered."""
        return self._lent.get(cluster, ())

    def add(self, cluster: ClusterId, found: Reservation) -> None:
        self._lent.setdefault(cluster, {})[found.id] = None
        self._sums[cluster] = self.total(cluster) + found.request.resources

    def remove(self, cluster: ClusterId, found: Reservation) -> None:
        del self._lent[cluster][found.id]
        self._sums[cluster] -= found.request.resources


class WaitQueue:
    """Waiting requests, and the clusters nominated for them."""

    def __init__(self, reservations: Mapping[ReservationId, Reservation]) -> None:
        self._reservations = reservations
        self._waiting: dict[ReservationId, None] = {}
        self._nominated: dict[ClusterId, ReservationId] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def count_of(self, requester: ClusterId) -> int:
        return sum(self._reservations[found].requester == requester for found in self._waiting)

    def in_order(self) -> list[Reservation]:
        """In serving order: by priority, then by age."""
        return sorted((self._reservations[found] for found in self._waiting), key=_rank)

    def nominated_waiter(self, cluster: ClusterId) -> Reservation | None:
        """The waiting request for which a cluster is nominated."""
        found = self._nominated.get(cluster)
        return None if found is None else self._reservations[found]

    def put(self, before: Reservation | None, after: Reservation, fleet: Fleet) -> ClusterId | None:
        """Applies a change of a reservation; returns the cluster that is no longer nominated for it."""
        if after.phase is Phase.PENDING:
            self._waiting[after.id] = None
        else:
            self._waiting.pop(after.id, None)
        old_nomination = None if before is None else before.nominated_cluster
        if old_nomination == after.nominated_cluster:
            return None
        if old_nomination is not None and self._nominated.get(old_nomination) == after.id:
            del self._nominated[old_nomination]
            fleet.set_nomination(old_nomination, None)
        else:
            old_nomination = None  # a request of higher rank has taken over the nomination
        if after.nominated_cluster is not None:
            self._nominate(after.nominated_cluster, after, fleet)
        return old_nomination

    def restore_nominations(self, changes: Iterable[Change], fleet: Fleet) -> None:
        """Nominates the clusters of replicated waiters again.

        A commit has only the last state of each record, so the waiter that displaced another one
        may have been applied after it, or not at all.
        """
        for waiter in changes:
            if not isinstance(waiter, Reservation) or waiter.nominated_cluster is None:
                continue
            other = self.nominated_waiter(waiter.nominated_cluster)
            is_last = self._reservations.get(waiter.id) is waiter
            if is_last and (other is None or _rank(waiter) < _rank(other)):
                self._nominate(waiter.nominated_cluster, waiter, fleet)

    def remove_cluster(self, cluster: ClusterId) -> None:
        """Removes the nomination of a deleted cluster."""
        self._nominated.pop(cluster, None)

    def _nominate(self, cluster: ClusterId, waiter: Reservation, fleet: Fleet) -> None:
        self._nominated[cluster] = waiter.id
        fleet.set_nomination(cluster, (waiter.request.priority, waiter.ticket))


def _rank(waiter: Reservation) -> tuple[int, int]:
    return -waiter.request.priority, waiter.ticket


class LimitIndex:
    """Administrators' limits and effective policies by cluster."""

    def __init__(self) -> None:
        self._limits: dict[ClusterId, Limits] = {}
        self._effective_policies: dict[ClusterId, EffectivePolicy] = {}

    @property
    def limits(self) -> Mapping[ClusterId, Limits]:
        return self._limits

    def effective_policy(self, provider: ClusterId) -> EffectivePolicy | None:
        """The effective policy of a provider; None if nothing is limited."""
        return self._effective_policies.get(provider)

    def clusters_with_policy(self) -> set[ClusterId]:
        """Clusters that advertise a policy, or for which one is set, also before they advertise."""
        return {
            *self._effective_policies,
            *(one.cluster for one in self._limits.values() if one.policy),
        }

    def put(self, limits: Limits) -> Change:
        if limits.policy is None and limits.quota is None:
            self._limits.pop(limits.cluster, None)
            return RecordDeleted("limits", limits.cluster)
        self._limits[limits.cluster] = limits
        return limits

    def recompute(self, provider: Cluster) -> EffectivePolicy | None:
        """Recomputes the effective policy of a provider."""
        limits = self._limits.get(provider.id)
        ordered = None if limits is None else limits.policy
        holds = lending.effective_policy(provider.advertisement.policy, ordered)
        if holds is None:
            self._effective_policies.pop(provider.id, None)
        else:
            self._effective_policies[provider.id] = holds
        return holds

    def remove_provider(self, provider: ClusterId) -> None:
        """Removes a deleted provider; the limits set by administrators stay."""
        self._effective_policies.pop(provider, None)


class MemberIndex:
    """Members and tokens by ID."""

    def __init__(self, members: Iterable[Member] = (), tokens: Iterable[Token] = ()) -> None:
        self._members = {member.id: member for member in members}
        self._tokens = {token.id: token for token in tokens}

    @property
    def members(self) -> Mapping[MemberId, Member]:
        return self._members

    @property
    def tokens(self) -> Mapping[TokenId, Token]:
        return self._tokens

    def member(self, role: Role, name: str) -> Member:
        found = self._members.get(member_id(role, name))
        if found is None:
            raise NotFound(f"no {role} {name!r} has joined", hint="see `kubelend get members`")
        return found

    def check_not_revoked(self, role: Role, name: str, not_before: datetime) -> None:
        """Raises `Revoked` for a certificate of a revoked member, or one issued before the revocation."""
        found = self._members.get(member_id(role, name))
        if found is None or found.revoked_at is None:
            return
        if found.status is MembershipStatus.REVOKED or not_before < found.revoked_at:
            raise Revoked(
                f"the certificate of {role} {name} was revoked at {found.revoked_at:%Y-%m-%dT%H:%M:%SZ}",
                hint="join again with a token from an administrator",
            )

    def apply(self, event: MembershipEvent, revision: int) -> Change:
        match event:
            case MemberChanged():
                change: Member | Token | RecordDeleted = replace(event.member, revision=revision)
            case MemberRemoved():
                change = RecordDeleted("member", event.member)
            case TokenChanged():
                change = replace(event.token, revision=revision)
            case TokenRemoved():
                change = RecordDeleted("token", event.token)
            case _:
                raise TypeError(f"not a membership event: {type(event).__name__}")
        self.apply_change(change)
        return change

    def apply_change(self, change: Member | Token | RecordDeleted) -> None:
        match change:
            case Member():
                self._members[change.id] = change
            case Token():
                self._tokens[change.id] = change
            case RecordDeleted(kind="member"):
                self._members.pop(MemberId(change.id), None)
            case RecordDeleted():
                self._tokens.pop(TokenId(change.id), None)

    def record_before(self, event: MembershipEvent) -> Member | Token | None:
        """The record that the event will change; None if it is new."""
        match event:
            case MemberChanged():
                return self._members.get(event.member.id)
            case MemberRemoved():
                return self._members.get(event.member)
            case TokenChanged():
                return self._tokens.get(event.token.id)
            case TokenRemoved():
                return self._tokens.get(event.token)
        raise TypeError(f"not a membership event: {type(event).__name__}")
