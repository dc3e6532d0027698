"""Opening hours as a column. Each distinct list is evaluated once between two of its changes."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import numpy as np

from kubelend.core import instants
from kubelend.core.coded import Coded
from kubelend.core.columns import FOREVER, Ints, Mask
from kubelend.core.hours import Timetable
from kubelend.core.instants import instant, micros

Hours = tuple[tuple[str, ...], ...]
"""Lists of opening hours, all of which have to be open."""


class Openings:
    """The opening hours of all clusters, one row each."""

    def __init__(self, capacity: int) -> None:
        self.hours: Coded[Hours] = Coded(capacity)
        self.opens_at: datetime | None = None
        """The earliest time at which a closed cluster opens; None if none will."""
        self._states: dict[Hours, _State] = {}
        self._opened: set[Hours] = set()

    def set(self, row: int, hours: Hours) -> bool:
        """Sets the hours of a row; True if they changed."""
        changed = self.hours.set(row, hours or None)
        if changed:
            self.opens_at = instants.EPOCH  # not evaluated yet
        return changed

    def look(self, now: int) -> int:
        """Evaluates all hours; returns the time of the next change."""
        self._states = {hours: self._looked_at(hours, now) for hours in self.hours.values()}
        closed = [state.until for state in self._states.values() if not state.is_open]
        self.opens_at = instant(min(closed)) if closed else None
        return min((state.until for state in self._states.values()), default=FOREVER)

    def is_open(self, row: int) -> bool:
        """As of the last `refresh`."""
        hours = self.hours.value(row)
        return hours is None or self._states[hours].is_open

    def open(self, size: int) -> Mask:
        """Open rows, as of the last `refresh`."""
        return self.hours.judged(lambda hours: self._states[hours].is_open, size)

    def opened(self, size: int) -> Ints:
        """Rows that have opened since the last call."""
        opened, self._opened = self._opened, set()
        if not opened:
            return np.empty(0, np.int64)
        return np.flatnonzero(
            self.hours.judged(opened.__contains__, size) & (self.hours.codes[:size] > 0)
        )

    def next_opening(self, row: int, now: datetime) -> datetime | None:
        """When a closed row opens; None if not within `SEARCH_DAYS`."""
        hours = self.hours.value(row)
        return None if hours is None else Timetable(hours).next_change(now)

    def _looked_at(self, hours: Hours, now: int) -> _State:
        known = self._states.get(hours)
        if known is not None and known.since <= now < known.until:
            return known
        table, at = Timetable(hours), instant(now)
        change = table.next_change(at)
        until = now + instants.DAY if change is None else micros(change)
        if table.is_open(at) and not (known and known.is_open):
            self._opened.add(hours)
        return _State(table.is_open(at), now, until)


class _State(NamedTuple):
    """Whether hours are open, between two changes."""

    is_open: bool
    since: int
    until: int
