"""Quota usage: held and waiting resources, and daily spend, of requesters with a quota.

Only requesters with a quota are tracked. The usage is derived from the reservations in the ledger
and never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from datetime import datetime
from typing import Self

from kubelend.core import instants
from kubelend.core.instants import DAY_MICROS, to_micros
from kubelend.core.lifecycle import FINAL, Phase
from kubelend.core.limits import Quota
from kubelend.core.models import ClusterId, Reservation
from kubelend.core.resources import NOTHING
from kubelend.core.spending import COST_UNITS_PER_BILLIONTH, CostInterval, DailySpend


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
        twin = copy(self)
        twin.daily_spend = self.daily_spend.copy()
        return twin

    def add(self, reservation: Reservation) -> None:
        if reservation.is_live:
            self.held += reservation.request.resources
            self.held_count += 1
        elif reservation.phase is Phase.PENDING:
            self.pending += reservation.request.resources
            self.pending_count += 1
        for span in self.cost_intervals(reservation):
            self.daily_spend.add(span)

    def remove(self, reservation: Reservation) -> None:
        if reservation.is_live:
            self.held -= reservation.request.resources
            self.held_count -= 1
        elif reservation.phase is Phase.PENDING:
            self.pending -= reservation.request.resources
            self.pending_count -= 1
        for span in self.cost_intervals(reservation):
            self.daily_spend.remove(span)

    def has_same_usage(self, one: Reservation, other: Reservation) -> bool:
        """Whether two versions of a reservation count the same."""
        waits = (one.phase is Phase.PENDING) == (other.phase is Phase.PENDING)
        holds = one.is_live == other.is_live
        return (
            holds and waits and list(self.cost_intervals(one)) == list(self.cost_intervals(other))
        )

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
            self.daily_spend.remove(without)
        most = self.daily_spend.max_hourly_price(
            self.quota.budget * COST_UNITS_PER_BILLIONTH, to_micros(since), to_micros(until)
        )
        if without is not None:
            self.daily_spend.add(without)
        return max(most, 0)

    def spent_today(self, now: datetime) -> int:
        """The cost of the current day in billionths, including that of reservations until they expire."""
        return (
            self.daily_spend.cost_on(instants.day_number(now)) + COST_UNITS_PER_BILLIONTH // 2
        ) // COST_UNITS_PER_BILLIONTH


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
        return instants.from_micros(DAY_MICROS * (max(days) + 1)) if days else None

    def waiting_on_budget(self) -> Iterator[ClusterId]:
        """Requesters with a budget and waiting requests: their remaining budget changes with time."""
        for requester, account in self.by_requester.items():
            if account.pending_count and account.quota.budget is not None:
                yield requester
