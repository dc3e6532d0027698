"""What the journal says must be there, held against what is: a record that is lost tells nothing itself.

The audit lets it hear every line that is kept, in order, beside the ledger of the same store. Of all that
the lines tell it remembers what is not over, and what the ledger has too. Lines are cut off some day, so
of an old record they may tell only the last changes; what they do not say is not guessed. Reservations,
members and tokens are compared: each of their changes has its line. Clusters are not, for a store in
Kubernetes may lose one, and it comes back with its next advertisement.
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
"""Each broker that has led had its own clock: what is not younger by this may be older than the cut."""

_KINDS = frozenset({"reservation", "member", "token"})
_BIRTH = events.Requested.__name__
_REMOVALS = frozenset({events.MemberRemoved.__name__, events.TokenRemoved.__name__})


class Witness:
    """Of one store: `hear` each line, then ask what is wrong."""

    def __init__(self, ledger: Ledger, settled: int) -> None:
        self._ledger = ledger
        self._settled = settled
        """The last line of which it is certain that the ledger has what it tells."""
        self._told: dict[str, _Said] = {}
        self._unsettled: set[str] = set()
        """What changed while the store was read: its record may be from before or from after."""
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
            # The broker has cut it off meanwhile: what was heard before may be over since.
            self._told.clear()
            self._begin = _Begin(line.number, words.at)
        self._reached = line.number
        if not words.code and words.kind in _KINDS:
            self._note(line.number, words)

    def lost(self) -> dict[ReservationId, str]:
        """Reservations that are not over, and that the store does not have; with a sentence for each."""
        return {
            ReservationId(_name(subject)): f"{_shown(subject)}: {_missing(said)}"
            for subject, said in self._judged()
            if subject.startswith("reservation/") and self._kept(subject) is None
        }

    def violations(self, start: int, end: int) -> list[str]:
        """All else that is wrong, a sentence each; the lines behind `start` up to `end` are to be there."""
        return [*self._gaps(start, end), *self._contradictions(), *self._untold(start)]

    def _note(self, number: int, words: _Words) -> None:
        subject = words.subject
        if number > self._settled:
            self._unsettled.add(subject)
        said = words.said
        if words.action != _BIRTH and subject in self._told:
            said = said.after(self._told[subject])
        if said.is_over and self._kept(subject) is None:
            self._told.pop(subject, None)  # it need not be there, and is not
        else:
            self._told[subject] = said

    def _judged(self) -> Iterator[tuple[str, _Said]]:
        return (item for item in self._told.items() if item[0] not in self._unsettled)

    def _gaps(self, start: int, end: int) -> Iterator[str]:
        for number in self._unreadable:
            yield f"line {number} of the journal cannot be read: see `kubelend audit verify`"
        begins_late = self._begin is not None and self._begin.number > start + 1
        if not self._unreadable and (begins_late or max(self._reached, start) < end):
            yield "lines of the journal are missing: see `kubelend audit verify`"

    def _contradictions(self) -> Iterator[str]:
        for subject, said in self._judged():
            kept = self._kept(subject)
            if kept is None and not subject.startswith("reservation/"):
                yield f"{_shown(subject)}: {_missing(said)}"
            elif kept is not None and not said.agrees_with(kept):
                yield f"{_shown(subject)}: the journal says that it {said}, and the store that it {kept}"

    def _untold(self, start: int) -> Iterator[str]:
        for found in self._ledger.reservations.values():
            subject = f"reservation/{found.id}"
            is_open = found.phase not in FINAL and subject not in self._unsettled
            if is_open and subject not in self._told and self._has_its_birth(found, start):
                yield f"{found.id}: the store says that it {_of(found)}, and the journal does not tell of it"

    def _has_its_birth(self, found: Reservation, start: int) -> bool:
        """Whether the line of its birth must be among those that were heard. An older store had no lines."""
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
    """Where the stretch of lines begins that was heard without a gap."""

    number: int
    at: datetime


class _Said(NamedTuple):
    """What is said of a record."""

    state: str = ""
    """The phase of a reservation, or the standing of a member; empty if it is not told."""
    target: str = ""
    is_removed: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the record may be gone."""
        return self.is_removed or self.state in FINAL

    def after(self, before: _Said) -> _Said:
        """With what was said before, and has not changed."""
        return _Said(self.state or before.state, self.target or before.target, self.is_removed)

    def agrees_with(self, kept: _Said) -> bool:
        # Nothing is told of what is over: so what is told of and does not end by it is not over.
        same_state = self.state == kept.state if self.state else kept.state not in FINAL
        return same_state and self.target in {"", kept.target} and not self.is_removed

    def __str__(self) -> str:
        if self.is_removed:
            return "was removed"
        return f"is {self.state or 'there'}" + (f" on {self.target}" if self.target else "")


class _Facts(msgspec.Struct, frozen=True, gc=False):
    phase: str = ""
    standing: str = ""
    target: str = ""


class _Words(msgspec.Struct, frozen=True, gc=False):
    """Of a line's text what is needed here: there may be millions."""

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
    """Reservations are known by their names alone."""
    return subject.removeprefix("reservation/")


def _missing(said: _Said) -> str:
    return f"the journal says that it {said}, and the store does not have it"
