"""Dictionary-encoded column: each distinct value is evaluated once, and rows refer to it by code."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np

from kubelend.core.columns import Ints, Mask

ColumnValue = TypeVar("ColumnValue", bound=Hashable)


class DictionaryColumn(Generic[ColumnValue]):
    """The code of each row's value; 0 for a row without one."""

    def __init__(self, capacity: int) -> None:
        self.codes: Ints = np.zeros(capacity, np.int64)
        self._codes_by_value: dict[ColumnValue, int] = {}
        self._use_counts: dict[ColumnValue, int] = {}
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

    def mask_where(self, judge: Callable[[ColumnValue], bool], size: int) -> Mask:
        """Rows whose value satisfies the predicate, and rows without a value."""
        verdicts = [value is None or judge(value) for value in self._values]
        mask: Mask = np.array(verdicts, np.bool_)[self.codes[:size]]
        return mask

    def _acquire_code(self, value: ColumnValue) -> int:
        number = self._codes_by_value.get(value)
        if number is None:
            number = self._codes_by_value[value] = self._new_code()
            self._values[number] = value
        self._use_counts[value] = self._use_counts.get(value, 0) + 1
        return number

    def _new_code(self) -> int:
        if self._unused_codes:
            return self._unused_codes.pop()
        self._values.append(None)
        return len(self._values) - 1

    def _release_code(self, value: ColumnValue) -> None:
        self._use_counts[value] -= 1
        if not self._use_counts[value]:
            del self._use_counts[value]
            number = self._codes_by_value.pop(value)
            self._values[number] = None
            self._unused_codes.append(number)
