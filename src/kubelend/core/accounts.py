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
from kubelend.core.instants import DAY, micros
from kubelend.core.lifecycle import FINAL, Phase
from kubelend.core.limits import Quota
from kubelend.core.models import ClusterId, Reservation
from kubelend.core.resources import NOTHING
from kubelend.core.spending import MONEY, Span, Spending


class Account:
    """Usage of one requester."""

    def __init__(self, quota: Quota, reservations: Iterable[Reservation] = ()) -> None:
        self.quota = quota
        self.held = NOTHING
        self.awaited = NOTHING
        self.holds = 0
        self.waits = 0
        self.spending = Spending()
        for reservation in reservations:
            self.add(reservation)

    def copy(self) -> Self:
        """An independent copy."""
        twin = copy(self)
        twin.spending = self.spending.copy()
        return twin

    def add(self, reservation: Reservation) -> None:
        if reservation.is_live:
            self.held += reservation.request.resources
            self.holds += 1
        elif reservation.phase is Phase.PENDING:
            self.awaited += reservation.request.resources
            self.waits += 1
        for span in self.spans(reservation):
            self.spending.add(span)

    def remove(self, reservation: Reservation) -> None:
        if reservation.is_live:
            self.held -= reservation.request.resources
            self.holds -= 1
        elif reservation.phase is Phase.PENDING:
            self.awaited -= reservation.request.resources
            self.waits -= 1
        for span in self.spans(reservation):
            self.spending.remove(span)

    def counts_alike(self, one: Reservation, other: Reservation) -> bool:
        """Whether two versions of a reservation count the same."""
        waits = (one.phase is Phase.PENDING) == (other.phase is Phase.PENDING)
        holds = one.is_live == other.is_live
        return holds and waits and list(self.spans(one)) == list(self.spans(other))

    def spans(self, reservation: Reservation) -> Iterator[Span]:
        """The cost intervals of a reservation that count against the budget."""
        if self.quota.budget is None:
            return
        for charge in reservation.charges:
            if charge.currency == self.quota.currency:
                yield Span(micros(charge.since), micros(charge.until), charge.hourly)
        span = self.running(reservation)
        if span is not None:
            yield span

    def running(self, reservation: Reservation) -> Span | None:
        """The cost interval at the current provider."""
        since, until = reservation.reserved_at, reservation.expires_at
        if not reservation.hourly or reservation.currency != self.quota.currency:
            return None
        if since is None or until is None:
            return None
        if reservation.finished_at is not None:
            until = min(until, reservation.finished_at)
        return Span(micros(since), micros(until), reservation.hourly)

    def most(self, since: datetime, until: datetime, without: Span | None = None) -> int | None:
        """The highest hourly price that the budget allows in this time, in billionths; None without
        a budget.

        `without` is an interval to disregard: a moving reservation pays for one provider only.
        """
        if self.quota.budget is None or until <= since:
            return None
        if without is not None:
            self.spending.remove(without)
        most = self.spending.most(self.quota.budget * MONEY, micros(since), micros(until))
        if without is not None:
            self.spending.add(without)
        return max(most, 0)

    def spent(self, now: datetime) -> int:
        """The cost of the current day in billionths, including that of reservations until they expire."""
        return (self.spending.on(instants.day_of(now)) + MONEY // 2) // MONEY


class Accounts:
    """Usage by requester. Only the ledger changes it."""

    def __init__(self) -> None:
        self.by_requester: dict[ClusterId, Account] = {}

    def get(self, requester: ClusterId) -> Account | None:
        return self.by_requester.get(requester)

    def open(
        self, requester: ClusterId, quota: Quota | None, reservations: Iterable[Reservation]
    ) -> None:
        """Rebuilds the usage of a requester; stops tracking it if it has no quota."""
        if quota is None:
            self.by_requester.pop(requester, None)
            return
        own = (found for found in reservations if found.requester == requester)
        self.by_requester[requester] = Account(quota, own)

    def move(self, before: Reservation | None, after: Reservation) -> bool:
        """Applies a change of a reservation; True if waiting requests of the requester must be retried."""
        account = self.by_requester.get(after.requester)
        if account is None or (before is not None and account.counts_alike(before, after)):
            return False
        if before is not None:
            account.remove(before)
        account.add(after)
        # A request that starts to wait neither takes from nor frees anything for those already waiting.
        begins_to_wait = before is None and after.phase is Phase.PENDING
        return account.waits > 0 and not begins_to_wait

    def forget(self, reservation: Reservation) -> None:
        account = self.by_requester.get(reservation.requester)
        if account is not None:
            account.remove(reservation)

    def kept_until(self, reservation: Reservation) -> datetime | None:
        """Until when a finished reservation counts against a daily budget; None if it does not."""
        account = self.by_requester.get(reservation.requester)
        if account is None or reservation.phase not in FINAL:
            return None
        days = [(span.until - 1) // DAY for span in account.spans(reservation)]
        return instants.instant(DAY * (max(days) + 1)) if days else None

    def waiting_for_money(self) -> Iterator[ClusterId]:
        """Requesters with a budget and waiting requests: their remaining budget changes with time."""
        for requester, account in self.by_requester.items():
            if account.waits and account.quota.budget is not None:
                yield requester
