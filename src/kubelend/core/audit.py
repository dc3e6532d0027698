"""Consistency checks: invariants of a ledger, and the store against its audit log.

`kubelend audit check` runs them on a store, and tests run them after every benchmark and fault test. The
indexes of a ledger must equal what its records imply. The replay of the audit log finds records
that are missing in the store.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from kubelend.core import events, lending
from kubelend.core.accounts import QuotaUsage
from kubelend.core.audit_log import AuditLine
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase
from kubelend.core.members import MemberId, TokenId
from kubelend.core.models import Cluster, ClusterId, Reservation, ReservationId
from kubelend.core.resources import Resources


def invariant_violations(ledger: Ledger) -> list[str]:
    """All violated invariants, one sentence each."""
    return [
        *_reserved_is_the_sum_of_live_reservations(ledger),
        *_free_is_what_is_left(ledger),
        *_quota_usage_counts_every_reservation(ledger),
        *_lent_counts_every_reservation(ledger),
        *(
            f"{found.id}: {problem}"
            for found in ledger.reservations.values()
            for problem in _inconsistencies(found)
        ),
        *_nominations_are_consistent(ledger),
        *_phase_counts_are_exact(ledger),
        *_keys_are_unique(ledger),
        *_revisions_are_in_the_past(ledger),
    ]


def overcommitted_clusters(ledger: Ledger) -> list[ClusterId]:
    """Clusters whose own pods use what they have lent: not a fault of the broker, but worth reporting."""
    return [
        found for found in ledger.clusters if any(n < 0 for _, n in ledger.available(found).items())
    ]


def _reserved_is_the_sum_of_live_reservations(ledger: Ledger) -> Iterator[str]:
    sums: dict[ClusterId, Resources] = defaultdict(Resources)
    for found in ledger.reservations.values():
        if found.is_live and found.target is not None:
            sums[found.target] += found.request.resources
    for cluster in sorted({*sums, *ledger.clusters}):
        if ledger.reserved(cluster) != sums[cluster]:
            yield (
                f"{cluster}: reserved is {ledger.reserved(cluster).quantities()},"
                f" its live reservations are {sums[cluster].quantities()}"
            )


def _free_is_what_is_left(ledger: Ledger) -> Iterator[str]:
    offers = (cluster.advertisement.allocatable for cluster in ledger.clusters.values())
    extended = sorted({name for offer in offers for name in offer.extended})
    for cluster, record in ledger.clusters.items():
        row = ledger.fleet.find_row(cluster)
        if row is None:
            continue
        available = _expected_lendable(ledger, record)
        for name in ("cpu", "memory", "gpu", "storage", *extended):
            column = ledger.fleet.free(name)
            if column is not None and int(column[row]) != available.amount(name):
                yield f"{cluster}: the fleet has {column[row]} {name} free, not {available.amount(name)}"
    if sorted(ledger.clusters) != ledger.fleet.ids:
        yield "the fleet does not contain the clusters of the ledger"


def _expected_lendable(ledger: Ledger, cluster: Cluster) -> Resources:
    """The lendable amount, computed from the records alone."""
    reserved = ledger.reserved(cluster.id)
    available = (cluster.ceiling - reserved).clamped()
    holds = lending.effective_policy(cluster.advertisement.policy, ledger.limits(cluster.id).policy)
    return available if holds is None else holds.lendable(available, reserved)


def _quota_usage_counts_every_reservation(ledger: Ledger) -> Iterator[str]:
    quotas = {
        name: limits.quota
        for name, limits in ledger.limit_index.limits.items()
        if limits.quota is not None
    }
    if quotas.keys() != ledger.quota_usages.by_requester.keys():
        yield "the quota usage does not cover exactly the requesters with a quota"
    for name, account in ledger.quota_usages.by_requester.items():
        own = [found for found in ledger.reservations.values() if found.requester == name]
        if name in quotas and _usage_sums(account) != _usage_sums(QuotaUsage(quotas[name], own)):
            yield f"{name}: the quota usage is not the sum of its reservations"


def _usage_sums(account: QuotaUsage) -> tuple[object, ...]:
    held = (account.held, account.held_count, account.pending, account.pending_count)
    return (*held, account.quota, account.daily_spend.steps())


def _lent_counts_every_reservation(ledger: Ledger) -> Iterator[str]:
    sums: dict[tuple[ClusterId, ClusterId], Resources] = defaultdict(Resources)
    for found in ledger.reservations.values():
        if found.is_live and found.target in ledger.fleet.lent_by_requester.tracked:
            sums[found.requester, found.target] += found.request.resources
    counted = {
        (requester, provider): lent
        for requester in {found.requester for found in ledger.reservations.values()}
        for provider, lent in ledger.fleet.lent_by_requester.for_requester(requester).items()
    }
    if counted != sums:
        yield "the amounts lent per requester are not the sums of its reservations"


def _inconsistencies(found: Reservation) -> Iterator[str]:
    if found.is_live and (found.target is None or found.expires_at is None):
        yield f"is {found.phase} without a target and an expiry"
    if found.target == found.requester:
        yield "has its requester as provider"
    if found.phase is Phase.PENDING and found.wait_until is None:
        yield "is Pending without a wait timeout"
    if not found.is_live and found.phase is not Phase.PENDING and found.finished_at is None:
        yield f"is {found.phase} without a finish time"
    if not found.request.resources:
        yield "requests no resources"


def _nominations_are_consistent(ledger: Ledger) -> Iterator[str]:
    waiters = [waiter for waiter in ledger.waiting() if waiter.nominated_cluster is not None]
    for waiter in waiters:
        cluster = waiter.nominated_cluster
        if cluster is not None and ledger.nominated_waiter(cluster) != waiter:
            yield f"{waiter.id}: {cluster} is not nominated for it"
    if len(waiters) != ledger.fleet.nomination_count:
        yield f"the fleet has {ledger.fleet.nomination_count} nominations for {len(waiters)} waiting requests"


def _phase_counts_are_exact(ledger: Ledger) -> Iterator[str]:
    counted = Counter((found.phase, found.reason) for found in ledger.reservations.values())
    for phase, reason in sorted({*counted, *ledger.phase_counts}):
        tallied, actual = ledger.phase_counts[phase, reason], counted[phase, reason]
        if tallied != actual:
            yield f"the count of {phase} with reason {reason} is {tallied}, not {actual}"


def _keys_are_unique(ledger: Ledger) -> Iterator[str]:
    keys = Counter(
        (found.requester, found.request.key)
        for found in ledger.reservations.values()
        if found.request.key is not None
    )
    for (requester, key), count in keys.items():
        if count > 1:
            yield f"{requester}: {count} reservations share the idempotency key {key!r}"


def _revisions_are_in_the_past(ledger: Ledger) -> Iterator[str]:
    records: list[Cluster | Reservation] = [*ledger.clusters.values()]
    for record in (*records, *ledger.reservations.values()):
        if record.revision > ledger.revision:
            yield f"{record.id}: revision {record.revision} is ahead of the ledger's {ledger.revision}"


MAX_CLOCK_SKEW = timedelta(hours=1)
"""Tolerance for the clocks of leaders: a record may be older than the truncation by this."""

_REPLAYED_KINDS = frozenset({"reservation", "member", "token"})
_CREATED_ACTION = events.Requested.__name__
DELETED_ACTION = "ReservationDeleted"
"""Recorded when a store is copied from which a reservation was deleted with its object."""
_REMOVED_ACTIONS = frozenset(
    {events.MemberRemoved.__name__, events.TokenRemoved.__name__, DELETED_ACTION}
)


class AuditLogReplay:
    """Replays the audit log of one store: `feed` each line, then query the result."""

    def __init__(self, ledger: Ledger, complete_until: int) -> None:
        self._ledger = ledger
        self._complete_until = complete_until
        """The last line whose change the ledger is certain to contain."""
        self._states: dict[str, _ReplayedState] = {}
        self._changed_during_load: set[str] = set()
        """Changed while the store was loaded: their records may be from before or after."""
        self._undecodable: list[int] = []
        self._start: _ReplayStart | None = None
        self._last_number = 0

    def feed(self, line: AuditLine) -> None:
        try:
            header = _decode_line_header(line.text)
        except msgspec.MsgspecError:
            self._undecodable.append(line.number)
            return
        if self._start is None or line.number != self._last_number + 1:
            # Truncated meanwhile: records of earlier lines may be final by now.
            self._states.clear()
            self._start = _ReplayStart(line.number, header.at)
        self._last_number = line.number
        if not header.code and header.subject.partition("/")[0] in _REPLAYED_KINDS:
            self._apply_line(line.number, header)

    def missing(self) -> dict[ReservationId, str]:
        """Reservations that are not final but missing in the store, with a sentence each."""
        return {
            ReservationId(_subject_display(subject)): _missing_message(subject, state)
            for subject, state in self._comparable_states()
            if subject.startswith("reservation/") and self._stored_state(subject) is None
        }

    def violations(self, start: int, end: int) -> list[str]:
        """All other faults, one sentence each; the lines after `start` up to `end` have to be present."""
        return [*self._gaps(start, end), *self._contradictions(), *self._unlogged(start)]

    def _apply_line(self, number: int, header: _LineHeader) -> None:
        subject = header.subject
        if number > self._complete_until:
            self._changed_during_load.add(subject)
        after, is_removed = header.after, header.action in _REMOVED_ACTIONS
        state = _ReplayedState(after.phase or after.status, after.target, is_removed)
        if header.action != _CREATED_ACTION and subject in self._states:
            state = state.merged_onto(self._states[subject])
        if state.is_final and self._stored_state(subject) is None:
            self._states.pop(subject, None)  # final and not stored, as expected
        else:
            self._states[subject] = state

    def _comparable_states(self) -> Iterator[tuple[str, _ReplayedState]]:
        return (item for item in self._states.items() if item[0] not in self._changed_during_load)

    def _gaps(self, start: int, end: int) -> Iterator[str]:
        for number in self._undecodable:
            yield f"line {number} of the audit log cannot be decoded: see `kubelend audit verify`"
        begins_late = self._start is not None and self._start.number > start + 1
        if not self._undecodable and (begins_late or max(self._last_number, start) < end):
            yield "lines of the audit log are missing: see `kubelend audit verify`"

    def _contradictions(self) -> Iterator[str]:
        for subject, logged in self._comparable_states():
            stored = self._stored_state(subject)
            if stored is None and not subject.startswith("reservation/"):
                yield _missing_message(subject, logged)
            elif stored is not None and not logged.matches(stored):
                yield f"{_subject_display(subject)}: it {logged} in the audit log, but {stored} in the store"

    def _unlogged(self, start: int) -> Iterator[str]:
        for found in self._ledger.reservations.values():
            subject = f"reservation/{found.id}"
            is_open = found.phase not in FINAL and subject not in self._changed_during_load
            if is_open and subject not in self._states and self._includes_creation(found, start):
                state = _reservation_state(found)
                yield f"{found.id}: it {state} in the store, but the audit log has no entry for it"

    def _includes_creation(self, found: Reservation, start: int) -> bool:
        """Whether the line of its creation has to be among those fed. Old stores have no audit log."""
        if self._start is None:
            return False
        return found.created_at > self._start.at + (MAX_CLOCK_SKEW if start else timedelta())

    def _stored_state(self, subject: str) -> _ReplayedState | None:
        kind, _, name = subject.partition("/")
        if kind == "reservation":
            reservation = self._ledger.reservations.get(ReservationId(name))
            return None if reservation is None else _reservation_state(reservation)
        if kind == "member":
            member = self._ledger.member_index.members.get(MemberId(name))
            return None if member is None else _ReplayedState(member.status)
        return _ReplayedState() if TokenId(name) in self._ledger.member_index.tokens else None


class _ReplayStart(NamedTuple):
    """Where the sequence of lines without a gap begins."""

    number: int
    at: datetime


class _ReplayedState(NamedTuple):
    """The state of a record."""

    state: str = ""
    """The phase of a reservation or the status of a member; empty if unknown."""
    target: str = ""
    is_removed: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the record may have been archived or deleted."""
        return self.is_removed or self.state in FINAL

    def merged_onto(self, before: _ReplayedState) -> _ReplayedState:
        """Fills unknown fields from the state before."""
        return _ReplayedState(
            self.state or before.state, self.target or before.target, self.is_removed
        )

    def matches(self, stored: _ReplayedState) -> bool:
        # Final records have no further entries: an entry that does not end a record implies it is not final.
        same_state = self.state == stored.state if self.state else stored.state not in FINAL
        return same_state and self.target in {"", stored.target} and not self.is_removed

    def __str__(self) -> str:
        if self.is_removed:
            return "was removed"
        return f"is {self.state or 'present'}" + (f" on {self.target}" if self.target else "")


class _LineFields(msgspec.Struct, frozen=True, gc=False):
    phase: str = ""
    status: str = ""
    target: str = ""


class _LineHeader(msgspec.Struct, frozen=True, gc=False):
    """The fields of a line needed here: there may be millions of lines."""

    at: datetime
    action: str
    subject: str
    after: _LineFields = _LineFields()
    code: str = ""


_decode_line_header = msgspec.json.Decoder(_LineHeader).decode


def _reservation_state(found: Reservation) -> _ReplayedState:
    return _ReplayedState(found.phase, found.target or "")


def _subject_display(subject: str) -> str:
    """Reservations are displayed by name, without their kind."""
    return subject.removeprefix("reservation/")


def _missing_message(subject: str, state: _ReplayedState) -> str:
    return f"{_subject_display(subject)}: it {state} in the audit log, but is missing in the store"
