"""Lending policies as columns; see `columns`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kubelend.core.coded import DictionaryColumn
from kubelend.core.columns import FOREVER, Ints, Mask, widen
from kubelend.core.lending import EVERYONE, Access, EffectivePolicy
from kubelend.core.models import ClusterId
from kubelend.core.openings import OpeningHoursColumn

MAX_REQUESTER_MASKS = 256
"""Cache size; the number of requesters is unbounded, so the cache is bounded."""


class LimitColumn:
    """Policy limits of one resource. A row without a policy has values that do not limit."""

    def __init__(self, capacity: int) -> None:
        self.available: Ints = np.zeros(capacity, np.int64)
        """Available amount regardless of the policy; only maintained for rows with a policy."""
        self.kept_back: Ints = np.zeros(capacity, np.int64)
        self.cap_left: Ints = np.full(capacity, FOREVER, np.int64)
        """What may still be lent under the total cap."""
        self.requester_cap: Ints = np.full(capacity, FOREVER, np.int64)
        """The cap per requester."""

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        return self.available, self.kept_back, self.cap_left, self.requester_cap

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

    def grow(self, capacity: int) -> None:
        self.available = widen(self.available, capacity)
        self.kept_back = widen(self.kept_back, capacity)
        self.cap_left = widen(self.cap_left, capacity)
        self.requester_cap = widen(self.requester_cap, capacity)


class RequesterMask(NamedTuple):
    """Clusters whose allow and deny lists admit a requester."""

    allowed: Mask
    not_denied: Mask
    admitted: Mask
    """Both."""


class PolicyColumns:
    """The policies of all clusters, one row each."""

    def __init__(self, capacity: int) -> None:
        self.has_policy: Mask = np.zeros(capacity, np.bool_)
        """Rows with a policy."""
        self.has_requester_cap: Mask = np.zeros(capacity, np.bool_)
        """Rows with a cap per requester."""
        self.policy_count = self.requester_cap_count = 0
        """Number of such rows."""
        self.access: DictionaryColumn[Access] = DictionaryColumn(capacity)
        self.opening_hours = OpeningHoursColumn(capacity)
        self._columns: dict[str, LimitColumn] = {}
        self._requester_masks: dict[ClusterId, RequesterMask] = {}
        self._capacity = capacity

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

    def grow(self, capacity: int) -> None:
        self._capacity = capacity
        self.has_policy, self.has_requester_cap = (
            widen(self.has_policy, capacity),
            widen(self.has_requester_cap, capacity),
        )
        self.access.codes = widen(self.access.codes, capacity)
        self.opening_hours.hours.codes = widen(self.opening_hours.hours.codes, capacity)
        for column in self._columns.values():
            column.grow(capacity)

    def arrays(self) -> Iterator[npt.NDArray[np.generic]]:
        """All arrays with a value per row, which insertions and removals shift."""
        yield from (
            self.has_policy,
            self.has_requester_cap,
            self.access.codes,
            self.opening_hours.hours.codes,
        )
        for column in self._columns.values():
            yield from column.arrays()

    # -- read by filters

    def column(self, name: str) -> LimitColumn:
        known = self._columns.get(name)
        if known is None:
            known = self._columns[name] = LimitColumn(self._capacity)
        return known

    def requester_mask(self, requester: ClusterId, size: int) -> RequesterMask:
        """Cached until any list changes."""
        known = self._requester_masks.get(requester)
        if known is None:
            if len(self._requester_masks) >= MAX_REQUESTER_MASKS:
                self._requester_masks.clear()
            known = self._requester_masks[requester] = self._compute_requester_mask(requester, size)
        return known

    def _compute_requester_mask(self, requester: ClusterId, size: int) -> RequesterMask:
        allowed = self.access.mask_where(lambda access: access.allows(requester), size)
        not_denied = self.access.mask_where(lambda access: not access.denies(requester), size)
        return RequesterMask(allowed, not_denied, allowed & not_denied)
