"""What the broker needs from the outside, as the smallest interfaces that serve it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol, TypeVar

from kubelend.core.events import Change
from kubelend.core.journal import Head, Line
from kubelend.core.members import Certificate
from kubelend.core.models import Reservation, ReservationId
from kubelend.core.records import News, Records
from kubelend.core.roles import Role

Answer = TypeVar("Answer")

Clock = Callable[[], datetime]
"""Gives the time, aware and in UTC. Only composition roots choose one."""


OpenStore = Callable[[], "Store"]
"""Opens the store, or raises `StoreFailed`; called again after every failure."""


class Store(Protocol):
    """Keeps records durably. Blocking; used by one thread at a time; errors are `StoreFailed`."""

    def load(self) -> Records:
        """The working set: all but the archive and the journal."""

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        """Keep all of the changes or none, and return when they would survive a crash.

        Later changes of one record win. `revision` is the ledger's after the last of them.
        """

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        """The same in two steps: what is quick is done now, and the rest when the result is called.

        The first may be taken in the event loop, the second in a thread; nothing else comes between.
        """

    def archived(self, reservation: ReservationId) -> Reservation | None:
        """A finished reservation that has left the working set."""

    def lines(self, after: int, limit: int) -> list[Line]:
        """The journal's lines behind this number, oldest first."""

    def journal_ends(self) -> tuple[Head, Head]:
        """Where the journal begins, behind what was cut off, and where it ends."""

    def check(self) -> None:
        """`StoreFailed` if somebody else has written since this one read or wrote."""

    def close(self) -> None:
        """Release files and locks; nothing is written."""


class Replica(Protocol):
    """How a broker that does not lead keeps up with the one that does."""

    def follow(self) -> AsyncGenerator[Records | News, None]:
        """First all that is there, then what changes; all of it again after a gap.

        Does not end by itself; `StoreFailed` if it cannot look.
        """

    async def ask(self, question: Callable[[Store], Answer]) -> Answer:
        """Have a store that is open for reading only answer what is not followed."""


class Leadership(Protocol):
    """Which of several brokers decides. It is a promise about time; the store alone makes it a fact,
    for it refuses every writer but the last that opened it.
    """

    @property
    def leads(self) -> bool:
        """Whether this broker leads at this very moment, by its own clock."""

    @property
    def term(self) -> int:
        """How often this broker has begun to lead. After an interruption, however short, it is another time:
        somebody else may have led and be gone again.
        """

    @property
    def leader(self) -> str:
        """How the broker that leads calls itself; empty if none is known."""

    async def won(self) -> None:
        """Wait until this broker leads."""

    async def look(self) -> None:
        """Ask at once who leads: something has happened as if it were another."""


class Applicant(NamedTuple):
    """What a certificate request says, and that its sender has the key. Nothing proves the name."""

    role: Role
    name: str
    key: str
    """The pin of the public key."""
    public_key: object
    """For the authority alone."""


class Issued(NamedTuple):
    """A certificate as its holder gets it."""

    chain: str
    """In PEM form: the certificate, and what its holder has to show behind it."""
    authorities: str
    """Whom its holder has to trust, in PEM form."""
    certificate: Certificate
    starts_at: datetime


class CertificateAuthority(Protocol):
    """Signs for those that the broker lets in. It may be exchanged for its successor at any time."""

    @property
    def pin(self) -> str:
        """By which a newcomer knows that it speaks to this broker."""

    @property
    def authorities(self) -> str:
        """Whom a newcomer has to trust, in PEM form."""

    @property
    def lifetime(self) -> timedelta:
        """How long its certificates are valid."""

    def read(self, request: str) -> Applicant:
        """A certificate request from anybody; `InvalidInput` if it cannot be relied on."""

    def issue(
        self,
        applicant: Applicant,
        now: datetime,
        not_before: datetime | None,
        longest: timedelta | None = None,
    ) -> Issued:
        """A certificate in this name and role, which does not start before `not_before`.

        It lives as long as others do, and not longer than `longest`.
        """
