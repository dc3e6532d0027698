"""Arrays with a place for each cluster: their types, one resource as such arrays, and how they grow."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

LOWEST, HIGHEST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
"""What a column of integers can hold."""
NEVER, FOREVER = LOWEST, HIGHEST


class Column:
    """One resource over all clusters."""

    def __init__(self, room: int) -> None:
        self.free: Ints = np.zeros(room, np.int64)
        """What can be promised now, never below zero; without what a policy withholds."""
        self.ceiling: Ints = np.zeros(room, np.int64)
        """The same if nothing were reserved."""
        self.free_float: Floats = np.zeros(room, np.float64)
        self.allocatable: Floats = np.ones(room, np.float64)
        """What is free, policy or not, and its divisor, for scores: a share needs no exactness."""

    def arrays(self) -> tuple[Ints, Ints, Floats, Floats]:
        return self.free, self.ceiling, self.free_float, self.allocatable

    def grow(self, room: int) -> None:
        self.free = widened(self.free, room)
        self.ceiling = widened(self.ceiling, room)
        self.free_float = widened(self.free_float, room)
        self.allocatable = widened(self.allocatable, room)


def widened(array: npt.NDArray[Scalar], room: int) -> npt.NDArray[Scalar]:
    """The same with more places at its end."""
    wide = np.zeros((*array.shape[:-1], room), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide
