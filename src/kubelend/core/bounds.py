"""Lending policies as columns; see `columns`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kubelend.core.coded import Coded
from kubelend.core.columns import FOREVER, Ints, Mask, widened
from kubelend.core.lending import EVERYONE, Access, Lending
from kubelend.core.models import ClusterId
from kubelend.core.openings import Openings

ADMISSIONS = 256
"""Cache size; the number of requesters is unbounded, so the cache is bounded."""


class Bound:
    """Policy limits of one resource. A row without a policy has values that do not limit."""

    def __init__(self, capacity: int) -> None:
        self.available: Ints = np.zeros(capacity, np.int64)
        """Available amount regardless of the policy; only maintained for rows with a policy."""
        self.kept_back: Ints = np.zeros(capacity, np.int64)
        self.cap_left: Ints = np.full(capacity, FOREVER, np.int64)
        """What may still be lent under the total cap."""
        self.share: Ints = np.full(capacity, FOREVER, np.int64)
        """The cap per requester."""

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        return self.available, self.kept_back, self.cap_left, self.share

    def bind(self, row: int, name: str, lending: Lending) -> None:
        """Writes the limits of a policy that do not depend on what is lent."""
        self.kept_back[row] = lending.keep_back.amount(name)
        self.share[row] = lending.max_per_requester.get(name, FOREVER)

    def withhold(self, row: int, available: int, cap_left: int) -> int:
        """Writes the available amount and the remaining cap; returns the free amount."""
        self.available[row], self.cap_left[row] = available, cap_left
        return min(max(available - int(self.kept_back[row]), 0), cap_left)

    def clear(self, row: int) -> None:
        self.available[row] = self.kept_back[row] = 0
        self.cap_left[row] = self.share[row] = FOREVER

    def grow(self, capacity: int) -> None:
        self.available = widened(self.available, capacity)
        self.kept_back = widened(self.kept_back, capacity)
        self.cap_left = widened(self.cap_left, capacity)
        self.share = widened(self.share, capacity)


class Admission(NamedTuple):
    """Clusters whose allow and deny lists admit a requester."""

    allowed: Mask
    not_denied: Mask
    admitted: Mask
    """Both."""


class Bounds:
    """The policies of all clusters, one row each."""

    def __init__(self, capacity: int) -> None:
        self.bound: Mask = np.zeros(capacity, np.bool_)
        """Rows with a policy."""
        self.sharing: Mask = np.zeros(capacity, np.bool_)
        """Rows with a cap per requester."""
        self.policies = self.shares = 0
        """Number of such rows."""
        self.access: Coded[Access] = Coded(capacity)
        self.openings = Openings(capacity)
        self._columns: dict[str, Bound] = {}
        self._admissions: dict[ClusterId, Admission] = {}
        self._capacity = capacity

    # -- written by the fleet

    def bind(self, row: int, lending: Lending | None) -> bool:
        """Writes lists and hours of a policy; True if the hours changed."""
        has_share = lending is not None and bool(lending.max_per_requester)
        self.policies += int(lending is not None) - int(self.bound[row])
        self.shares += int(has_share) - int(self.sharing[row])
        self.bound[row], self.sharing[row] = lending is not None, has_share
        access = EVERYONE if lending is None else lending.access
        if self.access.set(row, access if access != EVERYONE else None):
            self._admissions.clear()
        if lending is None:
            for column in self._columns.values():
                column.clear(row)
        return self.openings.set(row, () if lending is None else lending.hours)

    def inserted(self, row: int) -> None:
        """Resets an inserted row, which still has the values of the row behind it."""
        self.bound[row] = self.sharing[row] = False
        self.access.codes[row] = self.openings.hours.codes[row] = 0
        for column in self._columns.values():
            column.clear(row)
        self._admissions.clear()

    def removed(self) -> None:
        """Invalidates caches after a row was removed."""
        self._admissions.clear()

    def drop(self, name: str) -> None:
        """Drops the column of a resource that no cluster offers any more."""
        self._columns.pop(name, None)

    def grow(self, capacity: int) -> None:
        self._capacity = capacity
        self.bound, self.sharing = widened(self.bound, capacity), widened(self.sharing, capacity)
        self.access.codes = widened(self.access.codes, capacity)
        self.openings.hours.codes = widened(self.openings.hours.codes, capacity)
        for column in self._columns.values():
            column.grow(capacity)

    def arrays(self) -> Iterator[npt.NDArray[np.generic]]:
        """All arrays with a value per row, which insertions and removals shift."""
        yield from (self.bound, self.sharing, self.access.codes, self.openings.hours.codes)
        for column in self._columns.values():
            yield from column.arrays()

    # -- read by filters

    def column(self, name: str) -> Bound:
        known = self._columns.get(name)
        if known is None:
            known = self._columns[name] = Bound(self._capacity)
        return known

    def admission(self, requester: ClusterId, size: int) -> Admission:
        """Cached until any list changes."""
        known = self._admissions.get(requester)
        if known is None:
            if len(self._admissions) >= ADMISSIONS:
                self._admissions.clear()
            known = self._admissions[requester] = self._admit(requester, size)
        return known

    def _admit(self, requester: ClusterId, size: int) -> Admission:
        allowed = self.access.judged(lambda access: access.allows(requester), size)
        not_denied = self.access.judged(lambda access: not access.denies(requester), size)
        return Admission(allowed, not_denied, allowed & not_denied)
