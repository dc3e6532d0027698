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
from kubelend.core.journal import Line
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL
from kubelend.core.members import MemberId, TokenId
from kubelend.core.models import Reservation, ReservationId

SKEW = timedelta(hours=1)
"""Tolerance for the clocks of different leaders: a record that is not younger than the truncation
by this may be older.
"""

_KINDS = frozenset({"reservation", "member", "token"})
_BIRTH = events.Requested.__name__
_REMOVALS = frozenset({events.MemberRemoved.__name__, events.TokenRemoved.__name__})


class Witness:
    """Replays the audit log of one store: `feed` each line, then query the result."""

    def __init__(self, ledger: Ledger, settled: int) -> None:
        self._ledger = ledger
        self._settled = settled
        """The last line whose change the ledger is certain to contain."""
        self._told: dict[str, _Said] = {}
        self._unsettled: set[str] = set()
        """Subjects changed while the store was loaded: their records may be from before or after.
        """
        self._unreadable: list[int] = []
        self._begin: _Begin | None = None
        self._reached = 0

    def hear(self, line: Line) -> None:
        try:
            words = _decode(line.text)
        except msgspec.MsgspecError:
            self._unreadable.append(line.number)
            return
        if self._begin is None or line.number != self._reached + 1:
            # Truncated meanwhile: records of earlier lines may be final by now.
            self._told.clear()
            self._begin = _Begin(line.number, words.at)
        self._reached = line.number
        if not words.code and words.kind in _KINDS:
            self._note(line.number, words)

    def lost(self) -> dict[ReservationId, str]:
        """Reservations that are not final but missing in the store, with a sentence each."""
        return {
            ReservationId(_name(subject)): f"{_shown(subject)}: {_missing(said)}"
            for subject, said in self._judged()
            if subject.startswith("reservation/") and self._kept(subject) is None
        }

    def violations(self, start: int, end: int) -> list[str]:
        """All other faults, one sentence each; the lines after `start` up to `end` have to be present."""
        return [*self._gaps(start, end), *self._contradictions(), *self._untold(start)]

    def _note(self, number: int, words: _Words) -> None:
        subject = words.subject
        if number > self._settled:
            self._unsettled.add(subject)
        said = words.said
        if words.action != _BIRTH and subject in self._told:
            said = said.after(self._told[subject])
        if said.is_over and self._kept(subject) is None:
            self._told.pop(subject, None)  # final and not stored, as expected
        else:
            self._told[subject] = said

    def _judged(self) -> Iterator[tuple[str, _Said]]:
        return (item for item in self._told.items() if item[0] not in self._unsettled)

    def _gaps(self, start: int, end: int) -> Iterator[str]:
        for number in self._unreadable:
            yield f"line {number} of the audit log cannot be decoded: see `kubelend audit verify`"
        begins_late = self._begin is not None and self._begin.number > start + 1
        if not self._unreadable and (begins_late or max(self._reached, start) < end):
            yield "lines of the audit log are missing: see `kubelend audit verify`"

    def _contradictions(self) -> Iterator[str]:
        for subject, said in self._judged():
            kept = self._kept(subject)
            if kept is None and not subject.startswith("reservation/"):
                yield f"{_shown(subject)}: {_missing(said)}"
            elif kept is not None and not said.agrees_with(kept):
                yield f"{_shown(subject)}: it {said} in the audit log, but {kept} in the store"

    def _untold(self, start: int) -> Iterator[str]:
        for found in self._ledger.reservations.values():
            subject = f"reservation/{found.id}"
            is_open = found.phase not in FINAL and subject not in self._unsettled
            if is_open and subject not in self._told and self._has_its_birth(found, start):
                yield f"{found.id}: it {_of(found)} in the store, but the audit log has no entry for it"

    def _has_its_birth(self, found: Reservation, start: int) -> bool:
        """Whether the line of its creation has to be among those fed. Old stores have no audit log."""
        if self._begin is None:
            return False
        return found.created_at > self._begin.at + (SKEW if start else timedelta())

    def _kept(self, subject: str) -> _Said | None:
        kind, _, name = subject.partition("/")
        if kind == "reservation":
            reservation = self._ledger.reservations.get(ReservationId(name))
            return None if reservation is None else _of(reservation)
        if kind == "member":
            member = self._ledger.registry.members.get(MemberId(name))
            return None if member is None else _Said(member.standing)
        return _Said() if TokenId(name) in self._ledger.registry.tokens else None


class _Begin(NamedTuple):
    """Where the sequence of lines without a gap begins."""

    number: int
    at: datetime


class _Said(NamedTuple):
    """The state of a record."""

    state: str = ""
    """The phase of a reservation or the status of a member; empty if unknown."""
    target: str = ""
    is_removed: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the record may have been archived or deleted."""
        return self.is_removed or self.state in FINAL

    def after(self, before: _Said) -> _Said:
        """Fills unknown fields from the state before."""
        return _Said(self.state or before.state, self.target or before.target, self.is_removed)

    def agrees_with(self, kept: _Said) -> bool:
        # Final records have no further entries: an entry that does not end a record implies it is not final.
        same_state = self.state == kept.state if self.state else kept.state not in FINAL
        return same_state and self.target in {"", kept.target} and not self.is_removed

    def __str__(self) -> str:
        if self.is_removed:
            return "was removed"
        return f"is {self.state or 'present'}" + (f" on {self.target}" if self.target else "")


class _Facts(msgspec.Struct, frozen=True, gc=False):
    phase: str = ""
    standing: str = ""
    target: str = ""


class _Words(msgspec.Struct, frozen=True, gc=False):
    """The fields of a line needed here: there may be millions of lines."""

    at: datetime
    action: str
    subject: str
    after: _Facts = _Facts()
    code: str = ""

    @property
    def kind(self) -> str:
        return self.subject.partition("/")[0]

    @property
    def said(self) -> _Said:
        facts = self.after
        return _Said(facts.phase or facts.standing, facts.target, self.action in _REMOVALS)


_decode = msgspec.json.Decoder(_Words).decode


def _of(found: Reservation) -> _Said:
    return _Said(found.phase, found.target or "")


def _name(subject: str) -> str:
    return subject.partition("/")[2]


def _shown(subject: str) -> str:
    """Reservations are displayed by name, without their kind."""
    return subject.removeprefix("reservation/")


def _missing(said: _Said) -> str:
    return f"it {said} in the audit log, but is missing in the store"
