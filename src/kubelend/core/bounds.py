"""What lending policies withhold, as columns beside those of the fleet; there only while there are policies.

Headroom that is kept back and the cap on what is lent are folded into what the fleet shows as free, so
that a decision reads one column as ever; what is here tells the reasons apart. Lists of requesters and
opening hours are the same on many clusters, so each of them is judged once.
"""

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
"""Requesters whose masks are kept: the number of those who may ask is not bounded, so this one is."""


class Bound:
    """One resource over all clusters. A row without a policy has what limits nothing."""

    def __init__(self, room: int) -> None:
        self.available: Ints = np.zeros(room, np.int64)
        """What is there, whatever a policy says; only kept for rows with a policy."""
        self.kept_back: Ints = np.zeros(room, np.int64)
        self.cap_left: Ints = np.full(room, FOREVER, np.int64)
        """What may still be lent in total."""
        self.share: Ints = np.full(room, FOREVER, np.int64)
        """What one requester may have."""

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        return self.available, self.kept_back, self.cap_left, self.share

    def bind(self, row: int, name: str, lending: Lending) -> None:
        """Write what a policy says of this resource, whatever is lent."""
        self.kept_back[row] = lending.keep_back.amount(name)
        self.share[row] = lending.max_per_requester.get(name, FOREVER)

    def withhold(self, row: int, available: int, cap_left: int) -> int:
        """Write what is there and may still be lent; gives what of it is free."""
        self.available[row], self.cap_left[row] = available, cap_left
        return min(max(available - int(self.kept_back[row]), 0), cap_left)

    def clear(self, row: int) -> None:
        self.available[row] = self.kept_back[row] = 0
        self.cap_left[row] = self.share[row] = FOREVER

    def grow(self, room: int) -> None:
        self.available = widened(self.available, room)
        self.kept_back = widened(self.kept_back, room)
        self.cap_left = widened(self.cap_left, room)
        self.share = widened(self.share, room)


class Admission(NamedTuple):
    """Which clusters lend to a requester, as far as their lists say."""

    allowed: Mask
    not_denied: Mask
    admitted: Mask
    """Both."""


class Bounds:
    """The policies of a fleet, a row each."""

    def __init__(self, room: int) -> None:
        self.bound: Mask = np.zeros(room, np.bool_)
        """Rows with a policy."""
        self.sharing: Mask = np.zeros(room, np.bool_)
        """Rows that limit the share of one requester."""
        self.policies = self.shares = 0
        """How many there are of both."""
        self.access: Coded[Access] = Coded(room)
        self.openings = Openings(room)
        self._columns: dict[str, Bound] = {}
        self._admissions: dict[ClusterId, Admission] = {}
        self._room = room

    # -- what the fleet writes

    def bind(self, row: int, lending: Lending | None) -> bool:
        """Write whom a policy lends to and when; True if its hours are others than before."""
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
        """A row was made in between, still with what the one behind it has."""
        self.bound[row] = self.sharing[row] = False
        self.access.codes[row] = self.openings.hours.codes[row] = 0
        for column in self._columns.values():
            column.clear(row)
        self._admissions.clear()

    def removed(self) -> None:
        """A row that had no policy any more was closed up."""
        self._admissions.clear()

    def drop(self, name: str) -> None:
        """No cluster offers this resource any more."""
        self._columns.pop(name, None)

    def grow(self, room: int) -> None:
        self._room = room
        self.bound, self.sharing = widened(self.bound, room), widened(self.sharing, room)
        self.access.codes = widened(self.access.codes, room)
        self.openings.hours.codes = widened(self.openings.hours.codes, room)
        for column in self._columns.values():
            column.grow(room)

    def arrays(self) -> Iterator[npt.NDArray[np.generic]]:
        """Every array with a place per row, to be shifted by insertions and removals."""
        yield from (self.bound, self.sharing, self.access.codes, self.openings.hours.codes)
        for column in self._columns.values():
            yield from column.arrays()

    # -- what filters read

    def column(self, name: str) -> Bound:
        known = self._columns.get(name)
        if known is None:
            known = self._columns[name] = Bound(self._room)
        return known

    def admission(self, requester: ClusterId, size: int) -> Admission:
        """Kept until any list changes."""
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
