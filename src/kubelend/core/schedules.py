"""Deadline heaps for expiry and retention, with lazy deletion of outdated entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from heapq import heapify, heappop, heappush, heapreplace

from kubelend.core.accounts import QuotaUsages
from kubelend.core.lifecycle import FINAL
from kubelend.core.models import Reservation, ReservationId


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

    def load(self, reservations: Sequence[Reservation]) -> None:
        """Adds many new reservations."""
        for found in reservations:
            if found.finished_at is not None and found.phase in FINAL:
                self._finished.append((found.finished_at, found.id))
            elif (deadline := found.deadline) is not None:
                self._deadlines.append((deadline, found.id))
        heapify(self._finished)
        heapify(self._deadlines)

    def next_deadline(self) -> datetime | None:
        """The earliest deadline, which may be outdated."""
        return self._deadlines[0][0] if self._deadlines else None

    def overdue(self, now: datetime) -> Iterator[Reservation]:
        """Reservations whose deadline has passed, earliest first. End each before advancing the
        iterator.
        """
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
                heappop(
                    self._finished
                )  # already evicted; another reservation may have the same name
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
