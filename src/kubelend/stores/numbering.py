"""Which row of its table a reservation has.

Rows are numbered as they come, so that new ones fill the table's last page, and the numbers are known
here and not to an index in the file: over names that end in random digits it made a commit of 16
reservations write 29 pages where the rows need five.
"""

from __future__ import annotations

from collections.abc import Iterable

from kubelend.core.models import ReservationId
from kubelend.stores.records import Damaged


class Numbering:
    """The numbers of the rows that the file holds, and of those that a commit is about to add."""

    def __init__(self, rows: Iterable[tuple[int, ReservationId]]) -> None:
        self._numbers: dict[ReservationId, int] = {}
        for number, reservation in rows:
            if self._numbers.setdefault(reservation, number) != number:
                raise Damaged(f"it holds reservation {reservation!r} twice")
        self._last = max(self._numbers.values(), default=0)

    def find(self, reservation: ReservationId) -> int | None:
        return self._numbers.get(reservation)

    def with_new(self, reservations: Iterable[ReservationId]) -> dict[ReservationId, int]:
        """The number of each, new ones counted on: of a commit that may fail, so nothing is kept yet."""
        last = self._last
        numbers = {}
        for reservation in reservations:
            number = self._numbers.get(reservation)
            if number is None:
                number = last = last + 1
            numbers[reservation] = number
        return numbers

    def keep(self, committed: dict[ReservationId, int], gone: Iterable[ReservationId]) -> None:
        self._numbers.update(committed)
        self._last = max(self._last, *committed.values(), 0)
        for reservation in gone:
            self._numbers.pop(reservation, None)
