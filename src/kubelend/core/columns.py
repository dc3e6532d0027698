"""Column types of the fleet: resources, lending policies, dictionary-encoded values and opening hours.

Policy columns exist only while some cluster has a policy. Kept-back amounts and the total cap are
folded into the free amounts of the fleet, so that a placement reads one column; the columns here
tell the rejection reasons apart. Allow lists and opening hours are shared by many clusters, so they
are dictionary-encoded and evaluated once per distinct value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kubelend.core import durations
from kubelend.core.durations import from_micros, to_micros
from kubelend.core.lending import EVERYONE, AccessLists, EffectivePolicy, OpeningHours
from kubelend.core.models import ClusterId

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

INT64_MIN, INT64_MAX = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
"""Range of an integer column."""
NEVER, FOREVER = INT64_MIN, INT64_MAX


def widen(array: npt.NDArray[Scalar], capacity: int) -> npt.NDArray[Scalar]:
    """Copies the array into a longer one."""
    wide = np.zeros((*array.shape[:-1], capacity), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide


class ColumnGroup:
    """All array attributes, and those of nested groups: one value per row; they grow and shift together."""

    def nested(self) -> Iterable[ColumnGroup]:
        return ()

    def arrays(self) -> Iterator[npt.NDArray[np.generic]]:
        yield from (value for value in vars(self).values() if isinstance(value, np.ndarray))
        for group in self.nested():
            yield from group.arrays()

    def grow(self, capacity: int) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, widen(value, capacity))
        for group in self.nested():
            group.grow(capacity)


class ResourceColumn(ColumnGroup):
    """One resource of all clusters."""

    def __init__(self, capacity: int) -> None:
        self.free: Ints = np.zeros(capacity, np.int64)
        """What can be lent now, never negative; without what a policy withholds."""
        self.ceiling: Ints = np.zeros(capacity, np.int64)
        """What could be lent if nothing were reserved."""
        self.free_float: Floats = np.zeros(capacity, np.float64)
        self.allocatable: Floats = np.ones(capacity, np.float64)
        """Free amount regardless of policies, and its divisor, as floats for scores."""


MAX_REQUESTER_MASKS = 256
"""Cache size; the number of requesters is unbounded, so the cache is bounded."""


class LimitColumn(ColumnGroup):
    """Policy limits of one resource. A row without a policy has values that do not limit."""

    def __init__(self, capacity: int) -> None:
        self.available: Ints = np.zeros(capacity, np.int64)
        """Available amount regardless of the policy; only maintained for rows with a policy."""
        self.kept_back: Ints = np.zeros(capacity, np.int64)
        self.cap_left: Ints = np.full(capacity, FOREVER, np.int64)
        """What may still be lent under the total cap."""
        self.requester_cap: Ints = np.full(capacity, FOREVER, np.int64)
        """The cap per requester."""

    def set_policy(self, row: int, name: str, lending: EffectivePolicy) -> None:
        """Writes the limits of a policy that do not depend on what is lent."""
        self.kept_back[row] = lending.keep_back.amount(name)
        self.requester_cap[row] = lending.max_per_requester.get(name, FOREVER)

    def update_free(self, row: int, available: int, cap_left: int) -> int:
        """Writes the available amount and the remaining cap; returns the free amount."""
        self.available[row], self.cap_left[row] = available, cap_left
        return min(max(available - int(self.kept_back[row]), 0), cap_left)

    def clear(self, row: int) -> None:
        self.available[row] = self.kept_back[row] = 0
        self.cap_left[row] = self.requester_cap[row] = FOREVER


class RequesterMask(NamedTuple):
    """Clusters whose allow and deny lists admit a requester."""

    allowed: Mask
    not_denied: Mask
    admitted: Mask
    """Both."""


class PolicyColumns(ColumnGroup):
    """The policies of all clusters, one row each."""

    def __init__(self, capacity: int) -> None:
        self.has_policy: Mask = np.zeros(capacity, np.bool_)
        """Rows with a policy."""
        self.has_requester_cap: Mask = np.zeros(capacity, np.bool_)
        """Rows with a cap per requester."""
        self.policy_count = self.requester_cap_count = 0
        """Number of such rows."""
        self.access: DictionaryColumn[AccessLists] = DictionaryColumn(capacity)
        self.opening_hours = OpeningHoursColumn(capacity)
        self._columns: dict[str, LimitColumn] = {}
        self._requester_masks: dict[ClusterId, RequesterMask] = {}

    # -- written by the fleet

    def set_policy(self, row: int, lending: EffectivePolicy | None) -> bool:
        """Writes lists and hours of a policy; True if the hours changed."""
        has_share = lending is not None and bool(lending.max_per_requester)
        self.policy_count += int(lending is not None) - int(self.has_policy[row])
        self.requester_cap_count += int(has_share) - int(self.has_requester_cap[row])
        self.has_policy[row], self.has_requester_cap[row] = lending is not None, has_share
        access = EVERYONE if lending is None else lending.access
        if self.access.set(row, access if access != EVERYONE else None):
            self._requester_masks.clear()
        if lending is None:
            for column in self._columns.values():
                column.clear(row)
        return self.opening_hours.set(row, () if lending is None else lending.hours)

    def on_row_inserted(self, row: int) -> None:
        """Resets an inserted row, which still has the values of the row behind it."""
        self.has_policy[row] = self.has_requester_cap[row] = False
        self.access.codes[row] = self.opening_hours.hours.codes[row] = 0
        for column in self._columns.values():
            column.clear(row)
        self._requester_masks.clear()

    def on_row_removed(self) -> None:
        """Invalidates caches after a row was removed."""
        self._requester_masks.clear()

    def drop_resource(self, name: str) -> None:
        """Drops the column of a resource that no cluster offers any more."""
        self._columns.pop(name, None)

    def nested(self) -> Iterable[ColumnGroup]:
        return self.access, self.opening_hours.hours, *self._columns.values()

    # -- read by filters

    def column(self, name: str) -> LimitColumn:
        known = self._columns.get(name)
        if known is None:
            known = self._columns[name] = LimitColumn(len(self.has_policy))
        return known

    def requester_mask(self, requester: ClusterId, size: int) -> RequesterMask:
        """Cached until any list changes."""
        known = self._requester_masks.get(requester)
        if known is None:
            if len(self._requester_masks) >= MAX_REQUESTER_MASKS:
                self._requester_masks.clear()
            allowed = self.access.mask_where(lambda access: access.allows(requester), size)
            not_denied = self.access.mask_where(lambda access: not access.denies(requester), size)
            known = RequesterMask(allowed, not_denied, allowed & not_denied)
            self._requester_masks[requester] = known
        return known


ColumnValue = TypeVar("ColumnValue", bound=Hashable)


class DictionaryColumn(ColumnGroup, Generic[ColumnValue]):
    """The code of each row's value; 0 for a row without one."""

    def __init__(self, capacity: int) -> None:
        self.codes: Ints = np.zeros(capacity, np.int64)
        self._codes_by_value: dict[ColumnValue, int] = {}
        self._use_counts: Counter[ColumnValue] = Counter()
        self._unused_codes: list[int] = []
        self._values: list[ColumnValue | None] = [None]

    def __len__(self) -> int:
        """Number of distinct values."""
        return len(self._codes_by_value)

    def values(self) -> list[ColumnValue]:
        return list(self._codes_by_value)

    def value(self, row: int) -> ColumnValue | None:
        return self._values[int(self.codes[row])]

    def set(self, row: int, value: ColumnValue | None) -> bool:
        """Sets or clears the value of a row; True if it changed."""
        before = self.value(row)
        if before == value:
            return False
        self.codes[row] = 0 if value is None else self._acquire_code(value)
        if before is not None:
            self._release_code(before)
        return True

    def mask_where(self, predicate: Callable[[ColumnValue], bool], size: int) -> Mask:
        """Rows whose value satisfies the predicate, and rows without a value."""
        matches = [value is None or predicate(value) for value in self._values]
        mask: Mask = np.array(matches, np.bool_)[self.codes[:size]]
        return mask

    def _acquire_code(self, value: ColumnValue) -> int:
        number = self._codes_by_value.get(value)
        if number is None:
            if not self._unused_codes:
                self._unused_codes.append(len(self._values))
                self._values.append(None)
            number = self._codes_by_value[value] = self._unused_codes.pop()
            self._values[number] = value
        self._use_counts[value] += 1
        return number

    def _release_code(self, value: ColumnValue) -> None:
        self._use_counts[value] -= 1
        if not self._use_counts[value]:
            del self._use_counts[value]
            number = self._codes_by_value.pop(value)
            self._values[number] = None
            self._unused_codes.append(number)


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
            self.opens_at = durations.EPOCH  # not evaluated yet
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
        until = now + durations.DAY_MICROS if change is None else to_micros(change)
        if table.is_open(at) and not (known and known.is_open):
            self._newly_opened.add(hours)
        return _OpenState(table.is_open(at), now, until)


class _OpenState(NamedTuple):
    """Whether hours are open, between two changes."""

    is_open: bool
    since: int
    until: int
