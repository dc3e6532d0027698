"""Exact cost per UTC day.

Costs are hourly prices times durations, stored as billionths of the currency times microseconds per
hour: integers for every price and duration. The daily costs are stored as differences from one day
to the next, so a lease of years is as cheap to account as one of an hour.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kubelend.core.instants import DAY, HOUR

MONEY: Final = HOUR
"""Cost units per billionth of the currency: an hourly price of one billionth for one hour."""


class Span(NamedTuple):
    """An interval in microseconds with an hourly price."""

    since: int
    until: int
    hourly: int


class Spending:
    """Cost by day number."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        """Difference to the cost of the previous day."""

    def add(self, span: Span) -> None:
        self._count(span, 1)

    def remove(self, span: Span) -> None:
        self._count(span, -1)

    def on(self, day: int) -> int:
        """The cost of a day."""
        return sum(step for since, step in self._steps.items() if since <= day)

    def steps(self) -> dict[int, int]:
        return dict(self._steps)

    def copy(self) -> Spending:
        twin = Spending()
        twin._steps = self.steps()
        return twin

    def most(self, budget: int, since: int, until: int) -> int:
        """The highest hourly price in billionths that fits the budget on every day of the interval.

        `budget` is a cost per day. Negative if it is already exceeded.
        """
        first, last = since // DAY, (until - 1) // DAY
        if first == last:
            return (budget - self.on(first)) // (until - since)
        edges = [
            (budget - self.on(first)) // (DAY * (first + 1) - since),
            (budget - self.on(last)) // (until - DAY * last),
        ]
        if last - first > 1:
            edges.append((budget - self._highest(first + 1, last - 1)) // DAY)
        return min(edges)

    def _highest(self, first: int, last: int) -> int:
        """The cost of the most expensive of these days. Costs only rise at a step."""
        steps = [day for day in self._steps if first < day <= last]
        return max(self.on(day) for day in (first, *steps))

    def _count(self, span: Span, sign: int) -> None:
        since, until, hourly = span
        price = sign * hourly
        first, last = since // DAY, (until - 1) // DAY
        if until <= since:
            return
        if first == last:
            self._step(first, price * (until - since), last + 1)
            return
        self._step(first, price * (DAY * (first + 1) - since), first + 1)
        self._step(first + 1, price * DAY, last)
        self._step(last, price * (until - DAY * last), last + 1)

    def _step(self, since: int, cost: int, until: int) -> None:
        """Adds a cost to each day from `since` to before `until`."""
        if since == until:
            return
        for day, step in ((since, cost), (until, -cost)):
            total = self._steps.get(day, 0) + step
            if total:
                self._steps[day] = total
            else:
                self._steps.pop(day, None)
