"""Money by UTC day, counted exactly: what is spent on each day, and how dear something more may be.

Costs are hourly prices times spans of time, so they are kept as billionths of the currency times
microseconds per hour: whole numbers, whatever the price and the span. What is spent on the days is kept
as steps from one day to the next, so a lease for years costs no more to count than one for an hour.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kubelend.core.instants import DAY, HOUR

MONEY: Final = HOUR
"""So much of a cost is one billionth: the cost of an hourly price for an hour."""


class Span(NamedTuple):
    """Microseconds from one instant to another, at a price for each hour."""

    since: int
    until: int
    hourly: int


class Spending:
    """What falls on each day."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        """By how much a day costs more than the day before."""

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
        """The highest price, in billionths per hour, that fits the budget on each day it would run.

        `budget` is a cost for each day. Below zero where more is spent already.
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
        """The cost of the dearest of these days. It rises only where there is a step."""
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
        """The days from `since` on, and before `until`, cost so much more."""
        if since == until:
            return
        for day, step in ((since, cost), (until, -cost)):
            total = self._steps.get(day, 0) + step
            if total:
                self._steps[day] = total
            else:
                self._steps.pop(day, None)
