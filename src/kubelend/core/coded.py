"""Dictionary-encoded column: each distinct value is evaluated once, and rows refer to it by code."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np

from kubelend.core.columns import Ints, Mask

Value = TypeVar("Value", bound=Hashable)


class Coded(Generic[Value]):
    """The code of each row's value; 0 for a row without one."""

    def __init__(self, capacity: int) -> None:
        self.codes: Ints = np.zeros(capacity, np.int64)
        self._numbers: dict[Value, int] = {}
        self._uses: dict[Value, int] = {}
        self._unused: list[int] = []
        self._values: list[Value | None] = [None]

    def __len__(self) -> int:
        """Number of distinct values."""
        return len(self._numbers)

    def values(self) -> list[Value]:
        return list(self._numbers)

    def value(self, row: int) -> Value | None:
        return self._values[int(self.codes[row])]

    def set(self, row: int, value: Value | None) -> bool:
        """Sets or clears the value of a row; True if it changed."""
        before = self.value(row)
        if before == value:
            return False
        self.codes[row] = 0 if value is None else self._enter(value)
        if before is not None:
            self._leave(before)
        return True

    def judged(self, judge: Callable[[Value], bool], size: int) -> Mask:
        """Rows whose value satisfies the predicate, and rows without a value."""
        verdicts = [value is None or judge(value) for value in self._values]
        mask: Mask = np.array(verdicts, np.bool_)[self.codes[:size]]
        return mask

    def _enter(self, value: Value) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = self._new_number()
            self._values[number] = value
        self._uses[value] = self._uses.get(value, 0) + 1
        return number

    def _new_number(self) -> int:
        if self._unused:
            return self._unused.pop()
        self._values.append(None)
        return len(self._values) - 1

    def _leave(self, value: Value) -> None:
        self._uses[value] -= 1
        if not self._uses[value]:
            del self._uses[value]
            number = self._numbers.pop(value)
            self._values[number] = None
            self._unused.append(number)
