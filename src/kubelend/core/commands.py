"""Commands: generators of events with a result, including those that set policies and quotas.

A command reads the ledger and yields events; each is applied before the command continues. It
raises before its first event or not at all, so a rejected command has changed nothing.
`run_command` drives a command, serves the wait queue with freed capacity and builds the audit
entries.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple, TypeVar

from kubelend.core import explanations, quotas, transitions, waiting
from kubelend.core.audit_log import BROKER_ACTOR, Actor, AuditedRecord, AuditEntry, audited_fields
from kubelend.core.errors import Conflict, Forbidden, KeyReused, NotFound, QueueFull, WrongPhase
from kubelend.core.events import (
    Acknowledged,
    Activated,
    Advertised,
    Change,
    ClusterRemoved,
    Cordoned,
    Event,
    Failed,
    HoldReported,
    LeftByAnother,
    LimitsEvent,
    MembershipEvent,
    Nominated,
    Placed,
    PolicySet,
    QuotaSet,
    Released,
    Renewed,
    Requested,
    ReservationEvent,
    RetentionExpired,
    TakenOver,
    Uncordoned,
)
from kubelend.core.explanations import NoFit, Placement
from kubelend.core.ledger import Ledger
from kubelend.core.lending import NO_POLICY, LendingPolicy
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.models import (
    Advertisement,
    Cluster,
    ClusterId,
    HoldReport,
    Limits,
    Quota,
    Request,
    Reservation,
    ReservationId,
)

MAX_EVICTED_PER_SWEEP = 5000
"""Evictions per run, to bound the time in which callers wait; the rest follow in the next run."""

Result = TypeVar("Result")
Command = Generator[Event, None, Result]


def run_command(
    ledger: Ledger, command: Command[Result], now: datetime, actor: Actor = BROKER_ACTOR
) -> tuple[Result, list[Change]]:
    """Runs a command; returns its result and all changes to persist, including audit entries."""
    changes: list[Change] = []
    answer = _drive(ledger, command, changes, actor)
    if ledger.capacity_freed or ledger.quota_changed:
        for event in waiting.serve_queue(ledger, now):
            _apply(ledger, event, changes, BROKER_ACTOR)
    return answer, changes


def advertise(
    ledger: Ledger,
    advertisement: Advertisement,
    stale_after: timedelta,
    now: datetime,
    certificate_until: datetime | None = None,
) -> Command[Cluster]:
    """Stores an advertisement, valid for the time the cluster requests but at most `stale_after`."""
    valid_for = advertisement.valid_for
    valid_for = stale_after if valid_for is None else min(valid_for, stale_after)
    yield Advertised(now, advertisement, now + valid_for, certificate_until)
    return ledger.cluster(advertisement.cluster)


def take_over(left: LeftByAnother, stale_after: timedelta, now: datetime) -> Command[None]:
    """Takes over what another broker has left, also where it exceeds limits or what its provider has."""
    for found in left.advertisements:
        yield Advertised(now, found, min(found.sent_at, now) + stale_after)
    for reservation in left.reservations:
        yield TakenOver(now, reservation)


class WaitLimits(NamedTuple):
    """How many requests may wait for capacity."""

    total: int = 1000
    per_requester: int = 100

    def check(self, ledger: Ledger, requester: ClusterId) -> None:
        """Raises `QueueFull`."""
        if ledger.waiting_count >= self.total:
            raise QueueFull(f"{self.total} requests are already waiting", hint="retry later")
        if ledger.waiting_count_of(requester) >= self.per_requester:
            raise QueueFull(
                f"{self.per_requester} requests of {requester} are already waiting",
                hint="release one, or retry later",
            )


def reserve(
    ledger: Ledger, request: Request, new_id: ReservationId, limits: WaitLimits, now: datetime
) -> Command[ReservationId | NoFit]:
    """Reserves the resources on the best cluster; enqueues the request if none fits and it may wait."""
    known = None if request.key is None else ledger.by_key(request.requester, request.key)
    if known is not None:
        return _same_request(known, request).id
    if new_id in ledger.reservations:
        raise Conflict(f"{new_id} already exists", hint="retry the request")
    answer = explanations.decide_placement(quotas.admit_request(ledger, request, now), ledger.fleet)
    if isinstance(answer, NoFit):
        if not request.wait:
            return answer
        limits.check(ledger, request.requester)
        return (yield from _enqueue(ledger, request, answer, new_id, now))
    prices = ledger.clusters[answer.cluster].advertisement.prices
    yield Requested(
        now, transitions.new_placed_reservation(new_id, request, answer.cluster, prices, now)
    )
    return new_id


def activate(ledger: Ledger, reservation: ReservationId, now: datetime) -> Command[None]:
    """Marks the reservation as in use. Idempotent."""
    found = ledger.reservation(reservation)
    if found.phase is Phase.ACTIVE:
        return
    if found.phase is not Phase.RESERVED:
        raise WrongPhase(
            f"{found.id} is {found.phase}", hint="only a Reserved reservation can be activated"
        )
    yield Activated(now, reservation)


def renew(
    ledger: Ledger, reservation: ReservationId, duration: timedelta, now: datetime
) -> Command[None]:
    """Extends the reservation to `duration` from now; never shortens it.

    The agreed price stays, and the requester's budget has to cover it.
    """
    found = ledger.reservation(reservation)
    if not found.is_live or found.expires_at is None:
        raise WrongPhase(
            f"{found.id} is {found.phase}", hint="only a live reservation can be renewed"
        )
    if now + duration > found.expires_at:
        quotas.check_renewal_budget(ledger, found, now + duration)
        yield Renewed(now, reservation, now + duration)


def release(
    ledger: Ledger, reservation: ReservationId, reason: Reason, now: datetime
) -> Command[None]:
    """Releases the reservation. Idempotent."""
    found = ledger.reservation(reservation)
    if found.phase in FINAL:
        return
    yield Released(now, reservation, reason, _release_message(found, reason))


def purge_reservation(
    ledger: Ledger, reservation: ReservationId, reason: Reason, now: datetime
) -> Command[None]:
    """Releases the reservation and evicts it immediately, so that its name can be reused."""
    if reservation in ledger.reservations:
        yield from release(ledger, reservation, reason, now)
        yield RetentionExpired(now, reservation)


def acknowledge(
    ledger: Ledger,
    reservation: ReservationId,
    provider: ClusterId,
    held: HoldReport | None,
    now: datetime,
) -> Command[None]:
    """Records that the provider holds the resources, and what it reports about that. Idempotent."""
    found = _check_held_by(ledger, reservation, provider)
    if found.acknowledged_at is None:
        yield Acknowledged(now, reservation)
    if held is not None and held != found.held:
        yield HoldReported(now, reservation, held)


def refuse(
    ledger: Ledger, reservation: ReservationId, provider: ClusterId, reason: str, now: datetime
) -> Command[None]:
    """Moves the reservation off a provider that refuses it, or fails it if no other cluster fits.

    Idempotent, so that a retry after a lost response has no effect.
    """
    if has_refused(ledger.reservation(reservation), provider):
        return
    found = _check_held_by(ledger, reservation, provider)
    if found.phase is Phase.ACTIVE:
        raise WrongPhase(f"{found.id} is in use", hint="drain the cluster instead")
    answer = _decide_again(ledger, found, now)
    if isinstance(answer, NoFit):
        message = (
            f"Refused by {provider}: {reason or 'no reason given'}; then {_shown(ledger, answer)}"
        )
        yield Failed(now, reservation, Reason.REFUSED, message)
    else:
        yield move_event(ledger, found, answer.cluster, now)


def has_refused(found: Reservation, provider: ClusterId) -> bool:
    """Whether a refusal by this provider has already been processed."""
    failed = found.reason is Reason.REFUSED and found.target == provider
    return failed or provider in found.left


def cordon(ledger: Ledger, cluster: ClusterId, reason: str, now: datetime) -> Command[Cluster]:
    """Excludes a cluster from new placements; existing reservations stay."""
    if ledger.cluster(cluster).cordon != reason:
        yield Cordoned(now, cluster, reason)
    return ledger.cluster(cluster)


def uncordon(ledger: Ledger, cluster: ClusterId, now: datetime) -> Command[Cluster]:
    if ledger.cluster(cluster).cordon is not None:
        yield Uncordoned(now, cluster)
    return ledger.cluster(cluster)


def drain(
    ledger: Ledger, cluster: ClusterId, reason: str, now: datetime
) -> Command[list[ReservationId]]:
    """Cordons a cluster and moves its reservations; releases those that fit nowhere else."""
    yield from cordon(ledger, cluster, reason, now)
    lent = ledger.lent_by(cluster)
    for found in lent:
        answer = _decide_again(ledger, found, now)
        if isinstance(answer, NoFit):
            message = f"Cluster {cluster} was drained: {reason}; then {_shown(ledger, answer)}"
            yield Released(now, found.id, Reason.DRAINED, message)
        else:
            yield move_event(ledger, found, answer.cluster, now)
    return [found.id for found in lent]


def move_event(ledger: Ledger, found: Reservation, target: ClusterId, now: datetime) -> Placed:
    """The event that moves a reservation. The expiry stays, the price is that of the new provider."""
    expires_at = found.expires_at or now + found.request.duration
    prices = ledger.cluster(target).advertisement.prices
    return transitions.placed_event(found, target, prices, expires_at, Reason.MOVED, now)


def remove_cluster(ledger: Ledger, cluster: ClusterId, now: datetime) -> Command[None]:
    """Deletes a cluster without live reservations."""
    ledger.cluster(cluster)
    lent = ledger.lent_by(cluster)
    if lent:
        noun = "reservation" if len(lent) == 1 else "reservations"
        raise Conflict(f"{cluster} still lends {len(lent)} {noun}", hint="drain the cluster first")
    yield from _remove_offer(ledger, cluster, now)


def withdraw_offer(ledger: Ledger, cluster: ClusterId, now: datetime) -> Command[None]:
    """Deletes the offer of a cluster. Its reservations stay and count again when it advertises again."""
    if cluster in ledger.clusters:
        yield from _remove_offer(ledger, cluster, now)


def expire_reservations(ledger: Ledger, retention: timedelta, now: datetime) -> Command[None]:
    """Ends overdue reservations, evicts finished ones after retention, and updates opening hours."""
    ledger.tick(now)
    for found in ledger.overdue(now):
        if found.phase is Phase.PENDING:
            yield from _time_out(ledger, found, now)
        else:
            yield Released(now, found.id, Reason.EXPIRED, "Duration elapsed")
    for found in islice(ledger.finished_before(now - retention), MAX_EVICTED_PER_SWEEP):
        yield RetentionExpired(now, found.id)


def _drive(ledger: Ledger, command: Command[Result], changes: list[Change], actor: Actor) -> Result:
    while True:
        try:
            _apply(ledger, next(command), changes, actor)
        except StopIteration as end:
            answer: Result = end.value
            return answer


def _decide_again(ledger: Ledger, found: Reservation, now: datetime) -> Placement | NoFit:
    query = quotas.query_for_reservation(ledger, found, now)
    return explanations.decide_placement(query, ledger.fleet)


def _apply(ledger: Ledger, event: Event, changes: list[Change], actor: Actor) -> None:
    before = record_before(ledger, event)
    change = ledger.apply(event)
    changes.append(change)
    entry = audit_entry(actor, event, before, change)
    if entry is not None:
        changes.append(entry)


def _remove_offer(ledger: Ledger, cluster: ClusterId, now: datetime) -> Command[None]:
    """Deletes the cluster; the request it was nominated for is nominated elsewhere."""
    waiter = ledger.nominated_waiter(cluster)
    yield ClusterRemoved(now, cluster)
    if waiter is not None:
        yield from waiting.nominate(ledger, waiter, now)


def _same_request(known: Reservation, request: Request) -> Reservation:
    if known.request != request:
        raise KeyReused(
            f"idempotency key {request.key!r} was used for another request",
            hint="send the same request again, or use a new key",
        )
    return known


def _shown(ledger: Ledger, answer: NoFit) -> str:
    """The explanation as the requester may read it: in the message of a reservation."""
    return str(ledger.explain_others.reduce(answer.explanation))


def _release_message(found: Reservation, reason: Reason) -> str:
    if reason is Reason.DELETED:
        return "Released because its object was deleted"
    by = "an administrator" if reason is Reason.BY_ADMIN else f"requester {found.requester}"
    return f"Released by {by}"


def _enqueue(
    ledger: Ledger,
    request: Request,
    answer: NoFit,
    new_id: ReservationId,
    now: datetime,
) -> Command[ReservationId]:
    message = f"Waiting: {_shown(ledger, answer)}"
    waiter = Reservation(new_id, request, now, message=message, wait_until=now + request.wait)
    yield Requested(now, waiter)
    yield from waiting.nominate(ledger, ledger.reservation(new_id), now)
    return new_id


def _check_held_by(ledger: Ledger, reservation: ReservationId, provider: ClusterId) -> Reservation:
    found = ledger.reservation(reservation)
    if found.target != provider:
        raise Forbidden(f"{reservation} is not placed on {provider}")
    if not found.is_live:
        raise WrongPhase(
            f"{found.id} is {found.phase}",
            hint="the reservation is finished; release the held resources",
        )
    return found


def _time_out(ledger: Ledger, waiter: Reservation, now: datetime) -> Command[None]:
    """Serves the queue once more before failing the request: the same run may just have freed capacity."""
    yield from waiting.serve_queue(ledger, now)
    if ledger.reservation(waiter.id).phase is Phase.PENDING:
        answer = _decide_again(ledger, waiter, now)
        reason = f": {_shown(ledger, answer)}" if isinstance(answer, NoFit) else ""
        yield Failed(now, waiter.id, Reason.WAIT_TIMED_OUT, f"No cluster fitted in time{reason}")


def set_policy(
    ledger: Ledger, cluster: ClusterId, policy: LendingPolicy, now: datetime
) -> Command[Limits]:
    """Sets the administrators' policy of a provider, which may not have advertised yet."""
    wanted = None if policy == NO_POLICY else policy
    if ledger.limits(cluster).policy != wanted:
        yield PolicySet(now, cluster, wanted)
    return ledger.limits(cluster)


def clear_policy(ledger: Ledger, cluster: ClusterId, now: datetime) -> Command[None]:
    """Removes the administrators' policy; the provider's own policy stays in force."""
    if ledger.limits(cluster).policy is None:
        raise NotFound(f"no policy is set for {cluster!r}", hint="see `kubelend get policies`")
    yield PolicySet(now, cluster, None)


def set_quota(ledger: Ledger, cluster: ClusterId, quota: Quota, now: datetime) -> Command[Limits]:
    """Sets a quota; an empty quota only enables usage accounting."""
    if ledger.limits(cluster).quota != quota:
        yield QuotaSet(now, cluster, quota)
    return ledger.limits(cluster)


def clear_quota(ledger: Ledger, cluster: ClusterId, now: datetime) -> Command[None]:
    if ledger.limits(cluster).quota is None:
        raise quota_not_found(cluster)
    yield QuotaSet(now, cluster, None)


def quota_not_found(cluster: ClusterId) -> NotFound:
    return NotFound(f"{cluster!r} has no quota", hint="an administrator can set one")


_NOT_AUDITED = (Nominated, RetentionExpired)
"""Internal bookkeeping without effect on what a cluster holds or may do."""


def record_before(ledger: Ledger, event: Event) -> AuditedRecord | None:
    """The record that an event will change; None if it is new."""
    match event:
        case Requested() | TakenOver():
            return None
        case ReservationEvent():
            return ledger.reservations.get(event.reservation)
        case Advertised():
            return ledger.clusters.get(event.advertisement.cluster)
        case Cordoned() | Uncordoned() | ClusterRemoved():
            return ledger.clusters.get(event.cluster)
        case MembershipEvent():
            return ledger.member_index.record_before(event)
        case LimitsEvent():
            return ledger.limit_index.limits.get(event.cluster)
    raise TypeError(f"unknown event: {type(event).__name__}")


def audit_entry(
    actor: Actor, event: Event, before: AuditedRecord | None, change: Change
) -> AuditEntry | None:
    """The audit entry of an event; None if it is not audited."""
    if isinstance(event, _NOT_AUDITED) or _is_unchanged_offer(event, before, change):
        return None
    after = change if isinstance(change, AuditedRecord) else None
    record = after or before
    if record is None:
        raise TypeError(f"no record to audit: {event!r}")
    subject = f"{type(record).__name__.lower()}/{record.id}"
    return AuditEntry(event.at, actor, type(event).__name__, subject, before, after)


def _is_unchanged_offer(event: Event, before: AuditedRecord | None, change: Change) -> bool:
    """Whether an advertisement only updates measurements, which are not audited."""
    if not (isinstance(event, Advertised) and isinstance(before, Cluster)):
        return False
    old, new = before.advertisement, event.advertisement
    static = (old.labels, old.prices, old.endpoint, old.policy)
    if static == (new.labels, new.prices, new.endpoint, new.policy):
        return True
    return isinstance(change, Cluster) and audited_fields(before) == audited_fields(change)
