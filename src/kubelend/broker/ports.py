"""What the broker needs from the outside, as the smallest interfaces that serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from kubelend.core.events import Change
from kubelend.core.journal import Head, Line
from kubelend.core.models import Reservation, ReservationId
from kubelend.core.records import Records

Clock = Callable[[], datetime]
"""Gives the time, aware and in UTC. Only composition roots choose one."""


OpenStore = Callable[[], "Store"]
"""Opens the store, or raises `StoreFailed`; called again after every failure."""


class Store(Protocol):
    """Keeps records durably. Blocking; used by one thread at a time; errors are `StoreFailed`."""

    def load(self) -> Records:
        """The working set: all clusters, and all reservations that are not archived."""

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        """Keep all of the changes or none, and return when they would survive a crash.

        Later changes of one record win. `revision` is the ledger's after the last of them.
        """

    def archived(self, reservation: ReservationId) -> Reservation | None:
        """A finished reservation that has left the working set."""

    def lines(self, after: int, limit: int) -> list[Line]:
        """The journal's lines behind this number, oldest first."""

    def journal_ends(self) -> tuple[Head, Head]:
        """Where the journal begins, behind what was cut off, and where it ends."""

    def close(self) -> None:
        """Release files and locks; nothing is written."""
