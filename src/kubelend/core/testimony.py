"""Replays the audit log and compares the result with the store, to find lost records.

Feed it every stored line in order, with the ledger of the same store. It tracks records that are
not final, and those that the ledger has. The log may be truncated, so for an old record only its
last changes are known; unknown fields are not compared. Reservations, members and tokens are
compared, because each of their changes is audited. Clusters are not: the Kubernetes store may lose
one, which returns with its next advertisement.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from kubelend.core import events
from kubelend.core.journal import AuditLine
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL
from kubelend.core.members import MemberId, TokenId
from kubelend.core.models import Reservation, ReservationId

MAX_CLOCK_SKEW = timedelta(hours=1)
"""Tolerance for the clocks of different leaders: a record that is not younger than the truncation
by this may be older.
"""

_REPLAYED_KINDS = frozenset({"reservation", "member", "token"})
_CREATED_ACTION = events.Requested.__name__
_REMOVED_ACTIONS = frozenset({events.MemberRemoved.__name__, events.TokenRemoved.__name__})


class AuditLogReplay:
    """Replays the audit log of one store: `feed` each line, then query the result."""

    def __init__(self, ledger: Ledger, complete_until: int) -> None:
        self._ledger = ledger
        self._complete_until = complete_until
        """The last line whose change the ledger is certain to contain."""
        self._states: dict[str, _ReplayedState] = {}
        self._changed_during_load: set[str] = set()
        """Subjects changed while the store was loaded: their records may be from before or after.
        """
        self._undecodable: list[int] = []
        self._start: _ReplayStart | None = None
        self._last_number = 0

    def feed(self, line: AuditLine) -> None:
        try:
            words = _decode_line_header(line.text)
        except msgspec.MsgspecError:
            self._undecodable.append(line.number)
            return
        if self._start is None or line.number != self._last_number + 1:
            # Truncated meanwhile: records of earlier lines may be final by now.
            self._states.clear()
            self._start = _ReplayStart(line.number, words.at)
        self._last_number = line.number
        if not words.code and words.kind in _REPLAYED_KINDS:
            self._apply_line(line.number, words)

    def missing(self) -> dict[ReservationId, str]:
        """Reservations that are not final but missing in the store, with a sentence each."""
        return {
            ReservationId(
                _subject_id(subject)
            ): f"{_subject_display(subject)}: {_missing_message(said)}"
            for subject, said in self._comparable_states()
            if subject.startswith("reservation/") and self._stored_state(subject) is None
        }

    def violations(self, start: int, end: int) -> list[str]:
        """All other faults, one sentence each; the lines after `start` up to `end` have to be present."""
        return [*self._gaps(start, end), *self._contradictions(), *self._unlogged(start)]

    def _apply_line(self, number: int, words: _LineHeader) -> None:
        subject = words.subject
        if number > self._complete_until:
            self._changed_during_load.add(subject)
        said = words.replayed_state
        if words.action != _CREATED_ACTION and subject in self._states:
            said = said.merged_onto(self._states[subject])
        if said.is_final and self._stored_state(subject) is None:
            self._states.pop(subject, None)  # final and not stored, as expected
        else:
            self._states[subject] = said

    def _comparable_states(self) -> Iterator[tuple[str, _ReplayedState]]:
        return (item for item in self._states.items() if item[0] not in self._changed_during_load)

    def _gaps(self, start: int, end: int) -> Iterator[str]:
        for number in self._undecodable:
            yield f"line {number} of the audit log cannot be decoded: see `kubelend audit verify`"
        begins_late = self._start is not None and self._start.number > start + 1
        if not self._undecodable and (begins_late or max(self._last_number, start) < end):
            yield "lines of the audit log are missing: see `kubelend audit verify`"

    def _contradictions(self) -> Iterator[str]:
        for subject, said in self._comparable_states():
            kept = self._stored_state(subject)
            if kept is None and not subject.startswith("reservation/"):
                yield f"{_subject_display(subject)}: {_missing_message(said)}"
            elif kept is not None and not said.matches(kept):
                yield f"{_subject_display(subject)}: it {said} in the audit log, but {kept} in the store"

    def _unlogged(self, start: int) -> Iterator[str]:
        for found in self._ledger.reservations.values():
            subject = f"reservation/{found.id}"
            is_open = found.phase not in FINAL and subject not in self._changed_during_load
            if is_open and subject not in self._states and self._includes_creation(found, start):
                yield f"{found.id}: it {_reservation_state(found)} in the store, but the audit log has no entry for it"

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
            return None if member is None else _ReplayedState(member.standing)
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

    def matches(self, kept: _ReplayedState) -> bool:
        # Final records have no further entries: an entry that does not end a record implies it is not final.
        same_state = self.state == kept.state if self.state else kept.state not in FINAL
        return same_state and self.target in {"", kept.target} and not self.is_removed

    def __str__(self) -> str:
        if self.is_removed:
            return "was removed"
        return f"is {self.state or 'present'}" + (f" on {self.target}" if self.target else "")


class _LineFields(msgspec.Struct, frozen=True, gc=False):
    phase: str = ""
    standing: str = ""
    target: str = ""


class _LineHeader(msgspec.Struct, frozen=True, gc=False):
    """The fields of a line needed here: there may be millions of lines."""

    at: datetime
    action: str
    subject: str
    after: _LineFields = _LineFields()
    code: str = ""

    @property
    def kind(self) -> str:
        return self.subject.partition("/")[0]

    @property
    def replayed_state(self) -> _ReplayedState:
        facts = self.after
        return _ReplayedState(
            facts.phase or facts.standing, facts.target, self.action in _REMOVED_ACTIONS
        )


_decode_line_header = msgspec.json.Decoder(_LineHeader).decode


def _reservation_state(found: Reservation) -> _ReplayedState:
    return _ReplayedState(found.phase, found.target or "")


def _subject_id(subject: str) -> str:
    return subject.partition("/")[2]


def _subject_display(subject: str) -> str:
    """Reservations are displayed by name, without their kind."""
    return subject.removeprefix("reservation/")


def _missing_message(said: _ReplayedState) -> str:
    return f"it {said} in the audit log, but is missing in the store"
