"""A subset of the fleet: if few clusters fit, only those are scored."""

from __future__ import annotations

import numpy as np

from kubelend.core.columns import Floats, Ints
from kubelend.core.fleet import Fleet


class FleetSubset:
    """Some rows of a fleet, with the columns that scores need."""

    def __init__(self, fleet: Fleet, rows: Ints) -> None:
        self._fleet = fleet
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def currency(self) -> Ints:
        return self._fleet.currency[self._rows]

    @property
    def rates(self) -> Floats:
        return self._fleet.rates[:, self._rows]

    def free_and_allocatable(self, name: str) -> tuple[Floats, Floats] | None:
        shares = self._fleet.free_and_allocatable(name)
        return None if shares is None else (shares[0][self._rows], shares[1][self._rows])

    def scratch(self, _: int) -> Floats:
        return np.empty(len(self._rows), np.float64)
