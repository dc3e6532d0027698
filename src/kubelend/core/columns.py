"""Column types of the fleet: resources, lending policies, dictionary-encoded values and opening hours.

Policy columns exist only while some cluster has a policy. Kept-back amounts and the total cap are
folded into the free amounts of the fleet, so that a placement reads one column; the columns here
tell the rejection reasons apart. Allow lists and opening hours are shared by many clusters, so they
are dictionary-encoded and evaluated once per distinct value.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

INT64_MIN, INT64_MAX = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
"""Range of an integer column."""
NEVER, FOREVER = INT64_MIN, INT64_MAX


class ResourceColumn:
    """One resource of all clusters."""

    def __init__(self, capacity: int) -> None:
        self.free: Ints = np.zeros(capacity, np.int64)
        """What can be lent now, never negative; without what a policy withholds."""
        self.ceiling: Ints = np.zeros(capacity, np.int64)
        """What could be lent if nothing were reserved."""
        self.free_float: Floats = np.zeros(capacity, np.float64)
        self.allocatable: Floats = np.ones(capacity, np.float64)
        """Free amount regardless of policies, and its divisor, as floats for scores."""

    def arrays(self) -> tuple[Ints, Ints, Floats, Floats]:
        return self.free, self.ceiling, self.free_float, self.allocatable

    def grow(self, capacity: int) -> None:
        self.free = widen(self.free, capacity)
        self.ceiling = widen(self.ceiling, capacity)
        self.free_float = widen(self.free_float, capacity)
        self.allocatable = widen(self.allocatable, capacity)


def widen(array: npt.NDArray[Scalar], capacity: int) -> npt.NDArray[Scalar]:
    """Copies the array into a longer one."""
    wide = np.zeros((*array.shape[:-1], capacity), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide
