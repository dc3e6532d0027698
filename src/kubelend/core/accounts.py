"""Quota usage: held and waiting resources, and daily spend, of requesters with a quota.

Only requesters with a quota are tracked. The usage is derived from the reservations in the ledger
and never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from datetime import datetime
from typing import Final, NamedTuple, Self

from kubelend.core import durations
from kubelend.core.durations import DAY_MICROS, HOUR_MICROS, to_micros
from kubelend.core.lifecycle import FINAL, Phase
from kubelend.core.models import ClusterId, Quota, Reservation
from kubelend.core.resources import NOTHING


class QuotaUsage:
    """Usage of one requester."""

    def __init__(self, quota: Quota, reservations: Iterable[Reservation] = ()) -> None:
        self.quota = quota
        self.held = NOTHING
        self.pending = NOTHING
        self.held_count = 0
        self.pending_count = 0
        self.daily_spend = DailySpend()
        for reservation in reservations:
            self.add(reservation)

    def copy(self) -> Self:
        """An independent copy."""
        copied = copy(self)
        copied.daily_spend = self.daily_spend.copy()
        return copied

    def add(self, reservation: Reservation, sign: int = 1) -> None:
        amounts = reservation.request.resources
        if reservation.is_live:
            self.held = self.held + amounts if sign > 0 else self.held - amounts
            self.held_count += sign
        elif reservation.phase is Phase.PENDING:
            self.pending = self.pending + amounts if sign > 0 else self.pending - amounts
            self.pending_count += sign
        for span in self.cost_intervals(reservation):
            self.daily_spend.add(span, sign)

    def remove(self, reservation: Reservation) -> None:
        self.add(reservation, -1)

    def has_same_usage(self, one: Reservation, other: Reservation) -> bool:
        """Whether two versions of a reservation count the same."""
        waits = (one.phase is Phase.PENDING) == (other.phase is Phase.PENDING)
        if not waits or one.is_live != other.is_live:
            return False
        return list(self.cost_intervals(one)) == list(self.cost_intervals(other))

    def cost_intervals(self, reservation: Reservation) -> Iterator[CostInterval]:
        """The cost intervals of a reservation that count against the budget."""
        if self.quota.budget is None:
            return
        for charge in reservation.charges:
            if charge.currency == self.quota.currency:
                yield CostInterval(to_micros(charge.since), to_micros(charge.until), charge.hourly)
        span = self.current_interval(reservation)
        if span is not None:
            yield span

    def current_interval(self, reservation: Reservation) -> CostInterval | None:
        """The cost interval at the current provider."""
        since, until = reservation.reserved_at, reservation.expires_at
        if not reservation.hourly or reservation.currency != self.quota.currency:
            return None
        if since is None or until is None:
            return None
        if reservation.finished_at is not None:
            until = min(until, reservation.finished_at)
        return CostInterval(to_micros(since), to_micros(until), reservation.hourly)

    def max_hourly_price(
        self, since: datetime, until: datetime, without: CostInterval | None = None
    ) -> int | None:
        """The highest hourly price that the budget allows in this time, in billionths; None without
        a budget.

        `without` is an interval to disregard: a moving reservation pays for one provider only.
        """
        if self.quota.budget is None or until <= since:
            return None
        if without is not None:
            self.daily_spend.add(without, -1)
        most = self.daily_spend.max_hourly_price(
            self.quota.budget * COST_UNITS_PER_BILLIONTH, to_micros(since), to_micros(until)
        )
        if without is not None:
            self.daily_spend.add(without)
        return max(most, 0)

    def spent_today(self, now: datetime) -> int:
        """The cost of the current day in billionths, including that of reservations until they expire."""
        cost = self.daily_spend.cost_on(to_micros(now) // DAY_MICROS)
        return (cost + COST_UNITS_PER_BILLIONTH // 2) // COST_UNITS_PER_BILLIONTH


class QuotaUsages:
    """Usage by requester. Only the ledger changes it."""

    def __init__(self) -> None:
        self.by_requester: dict[ClusterId, QuotaUsage] = {}

    def get(self, requester: ClusterId) -> QuotaUsage | None:
        return self.by_requester.get(requester)

    def reset(
        self, requester: ClusterId, quota: Quota | None, reservations: Iterable[Reservation]
    ) -> None:
        """Rebuilds the usage of a requester; stops tracking it if it has no quota."""
        if quota is None:
            self.by_requester.pop(requester, None)
            return
        own = (found for found in reservations if found.requester == requester)
        self.by_requester[requester] = QuotaUsage(quota, own)

    def update(self, before: Reservation | None, after: Reservation) -> bool:
        """Applies a change of a reservation; True if waiting requests of the requester must be retried."""
        account = self.by_requester.get(after.requester)
        if account is None or (before is not None and account.has_same_usage(before, after)):
            return False
        if before is not None:
            account.remove(before)
        account.add(after)
        # A request that starts to wait neither takes from nor frees anything for those already waiting.
        begins_to_wait = before is None and after.phase is Phase.PENDING
        return account.pending_count > 0 and not begins_to_wait

    def remove(self, reservation: Reservation) -> None:
        account = self.by_requester.get(reservation.requester)
        if account is not None:
            account.remove(reservation)

    def retained_until(self, reservation: Reservation) -> datetime | None:
        """Until when a finished reservation counts against a daily budget; None if it does not."""
        account = self.by_requester.get(reservation.requester)
        if account is None or reservation.phase not in FINAL:
            return None
        days = [(span.until - 1) // DAY_MICROS for span in account.cost_intervals(reservation)]
        return durations.from_micros(DAY_MICROS * (max(days) + 1)) if days else None

    def waiting_on_budget(self) -> Iterator[ClusterId]:
        """Requesters with a budget and waiting requests: their remaining budget changes with time."""
        for requester, account in self.by_requester.items():
            if account.pending_count and account.quota.budget is not None:
                yield requester


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

    def add(self, span: CostInterval, sign: int = 1) -> None:
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

    def cost_on(self, day: int) -> int:
        """The cost of a day."""
        return sum(step for since, step in self._steps.items() if since <= day)

    def steps(self) -> dict[int, int]:
        return dict(self._steps)

    def copy(self) -> DailySpend:
        copied = DailySpend()
        copied._steps = self.steps()
        return copied

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
            # The most expensive day in between: costs only rise at a step.
            steps = (day for day in self._steps if first + 1 < day < last)
            most = max(self.cost_on(day) for day in (first + 1, *steps))
            edges.append((budget - most) // DAY_MICROS)
        return min(edges)

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
