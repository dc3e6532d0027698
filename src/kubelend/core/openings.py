"""Opening hours as a column. Each distinct list is evaluated once between two of its changes."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import numpy as np

from kubelend.core import instants
from kubelend.core.coded import DictionaryColumn
from kubelend.core.columns import FOREVER, Ints, Mask
from kubelend.core.hours import OpeningHours
from kubelend.core.instants import from_micros, to_micros

HoursLists = tuple[tuple[str, ...], ...]
"""Lists of opening hours, all of which have to be open."""


class OpeningHoursColumn:
    """The opening hours of all clusters, one row each."""

    def __init__(self, capacity: int) -> None:
        self.hours: DictionaryColumn[HoursLists] = DictionaryColumn(capacity)
        self.opens_at: datetime | None = None
        """The earliest time at which a closed cluster opens; None if none will."""
        self._states: dict[HoursLists, _OpenState] = {}
        self._newly_opened: set[HoursLists] = set()

    def set(self, row: int, hours: HoursLists) -> bool:
        """Sets the hours of a row; True if they changed."""
        changed = self.hours.set(row, hours or None)
        if changed:
            self.opens_at = instants.EPOCH  # not evaluated yet
        return changed

    def refresh(self, now: int) -> int:
        """Evaluates all hours; returns the time of the next change."""
        self._states = {hours: self._state_at(hours, now) for hours in self.hours.values()}
        closed = [state.until for state in self._states.values() if not state.is_open]
        self.opens_at = from_micros(min(closed)) if closed else None
        return min((state.until for state in self._states.values()), default=FOREVER)

    def is_open(self, row: int) -> bool:
        """As of the last `refresh`."""
        hours = self.hours.value(row)
        return hours is None or self._states[hours].is_open

    def open_mask(self, size: int) -> Mask:
        """Open rows, as of the last `refresh`."""
        return self.hours.mask_where(lambda hours: self._states[hours].is_open, size)

    def newly_opened(self, size: int) -> Ints:
        """Rows that have opened since the last call."""
        opened, self._newly_opened = self._newly_opened, set()
        if not opened:
            return np.empty(0, np.int64)
        return np.flatnonzero(
            self.hours.mask_where(opened.__contains__, size) & (self.hours.codes[:size] > 0)
        )

    def next_opening(self, row: int, now: datetime) -> datetime | None:
        """When a closed row opens; None if not within `SEARCH_DAYS`."""
        hours = self.hours.value(row)
        return None if hours is None else OpeningHours(hours).next_change(now)

    def _state_at(self, hours: HoursLists, now: int) -> _OpenState:
        known = self._states.get(hours)
        if known is not None and known.since <= now < known.until:
            return known
        table, at = OpeningHours(hours), from_micros(now)
        change = table.next_change(at)
        until = now + instants.DAY_MICROS if change is None else to_micros(change)
        if table.is_open(at) and not (known and known.is_open):
            self._newly_opened.add(hours)
        return _OpenState(table.is_open(at), now, until)


class _OpenState(NamedTuple):
    """Whether hours are open, between two changes."""

    is_open: bool
    since: int
    until: int
