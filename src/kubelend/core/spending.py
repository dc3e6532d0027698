"""Exact cost per UTC day.

Costs are hourly prices times durations, stored as billionths of the currency times microseconds per
hour: integers for every price and duration. The daily costs are stored as differences from one day
to the next, so a lease of years is as cheap to account as one of an hour.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kubelend.core.instants import DAY_MICROS, HOUR_MICROS

COST_UNITS_PER_BILLIONTH: Final = HOUR_MICROS
"""Cost units per billionth of the currency: an hourly price of one billionth for one hour."""


class CostInterval(NamedTuple):
    """An interval in microseconds with an hourly price."""

    since: int
    until: int
    hourly: int


class DailySpend:
    """Cost by day number."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        """Difference to the cost of the previous day."""

    def add(self, span: CostInterval) -> None:
        self._accumulate(span, 1)

    def remove(self, span: CostInterval) -> None:
        self._accumulate(span, -1)

    def cost_on(self, day: int) -> int:
        """The cost of a day."""
        return sum(step for since, step in self._steps.items() if since <= day)

    def steps(self) -> dict[int, int]:
        return dict(self._steps)

    def copy(self) -> DailySpend:
        twin = DailySpend()
        twin._steps = self.steps()
        return twin

    def max_hourly_price(self, budget: int, since: int, until: int) -> int:
        """The highest hourly price in billionths that fits the budget on every day of the interval.

        `budget` is a cost per day. Negative if it is already exceeded.
        """
        first, last = since // DAY_MICROS, (until - 1) // DAY_MICROS
        if first == last:
            return (budget - self.cost_on(first)) // (until - since)
        edges = [
            (budget - self.cost_on(first)) // (DAY_MICROS * (first + 1) - since),
            (budget - self.cost_on(last)) // (until - DAY_MICROS * last),
        ]
        if last - first > 1:
            edges.append((budget - self._max_cost(first + 1, last - 1)) // DAY_MICROS)
        return min(edges)

    def _max_cost(self, first: int, last: int) -> int:
        """The cost of the most expensive of these days. Costs only rise at a step."""
        steps = [day for day in self._steps if first < day <= last]
        return max(self.cost_on(day) for day in (first, *steps))

    def _accumulate(self, span: CostInterval, sign: int) -> None:
        since, until, hourly = span
        price = sign * hourly
        first, last = since // DAY_MICROS, (until - 1) // DAY_MICROS
        if until <= since:
            return
        if first == last:
            self._add_step(first, price * (until - since), last + 1)
            return
        self._add_step(first, price * (DAY_MICROS * (first + 1) - since), first + 1)
        self._add_step(first + 1, price * DAY_MICROS, last)
        self._add_step(last, price * (until - DAY_MICROS * last), last + 1)

    def _add_step(self, since: int, cost: int, until: int) -> None:
        """Adds a cost to each day from `since` to before `until`."""
        if since == until:
            return
        for day, step in ((since, cost), (until, -cost)):
            total = self._steps.get(day, 0) + step
            if total:
                self._steps[day] = total
            else:
                self._steps.pop(day, None)
