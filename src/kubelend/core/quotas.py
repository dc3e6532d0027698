"""Quota and budget checks.

Amounts and counts include both held and waiting requests, so that serving a waiting request never
exceeds a quota. A budget is money per UTC day; see `DailySpend`. The check runs for every request;
for a requester without a quota it is a single dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from msgspec.structs import replace

from kubelend.core import prices, resources
from kubelend.core.accounts import CostInterval, QuotaUsage
from kubelend.core.durations import to_micros
from kubelend.core.errors import QuotaExceeded
from kubelend.core.filters import BudgetLimit, PlacementQuery
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.core.models import Request, Reservation


def admit_request(ledger: Ledger, request: Request, now: datetime) -> PlacementQuery:
    """The placement query of a new request; raises `QuotaExceeded` for its amounts or count."""
    for excess in quota_violations(ledger, request):
        raise excess
    return query_for_request(ledger, request, now)


def query_for_request(ledger: Ledger, request: Request, now: datetime) -> PlacementQuery:
    """The placement query of a request, without checking amounts and count."""
    account = ledger.quota_usages.get(request.requester)
    if account is None:
        return PlacementQuery(request, now)
    return PlacementQuery(request, now, budget=_budget_limit(account, now, now + request.duration))


def query_for_reservation(ledger: Ledger, found: Reservation, now: datetime) -> PlacementQuery:
    """The placement query of a reservation, with its rank and without its previous providers."""
    left = found.left if found.target is None else (*found.left, found.target)
    query = PlacementQuery(found.request, now, found.ticket, left)
    account = ledger.quota_usages.get(found.requester)
    if account is None:
        return query
    until, costs = now + found.request.duration, None
    if found.is_live and found.expires_at is not None:
        until, costs = found.expires_at, account.current_interval(found)
        if costs is not None:  # the part after `now`
            costs = costs._replace(since=max(costs.since, to_micros(now)))
    return replace(query, budget=_budget_limit(account, now, until, costs))


def quota_violations(
    ledger: Ledger, request: Request, own: Reservation | None = None
) -> tuple[QuotaExceeded, ...]:
    """All errors that a request would raise because of its requester's quota.

    `own` is the reservation of this request: while it waits, it does not count against itself.
    """
    account = ledger.quota_usages.get(request.requester)
    if account is None:
        return ()
    if own is not None and own.phase is Phase.PENDING:
        account = account.copy()
        account.remove(own)
    return tuple(_violations(account, request))


def blocked_by_quota(ledger: Ledger, waiter: Reservation) -> bool:
    """Whether a waiting request exceeds a quota that was lowered after it was accepted."""
    account = ledger.quota_usages.get(waiter.requester)
    if account is None:
        return False
    most = account.quota.reservations
    held = account.held + waiter.request.resources
    return (most is not None and account.held_count >= most) or any(
        held.amount(name) > cap
        for name, cap in account.quota.amounts.items()
        if waiter.request.resources.amount(name)
    )


def check_renewal_budget(ledger: Ledger, found: Reservation, until: datetime) -> None:
    """Raises `QuotaExceeded` if the requester's budget does not cover the renewal."""
    account = ledger.quota_usages.get(found.requester)
    if account is None or account.quota.budget is None or not found.hourly:
        return
    currency, budget = account.quota.currency, prices.format_price(account.quota.budget)
    if found.currency != currency:
        raise QuotaExceeded(
            f"{found.id} costs {found.currency}, but {found.requester} has a budget in {currency} only",
            hint="borrow from a cluster that charges in that currency",
        )
    most = account.max_hourly_price(found.expires_at or until, until)
    if most is not None and found.hourly > most:
        raise QuotaExceeded(
            f"the budget of {found.requester}, {budget} {currency} a day, leaves"
            f" {prices.format_price(most)} per hour, but {found.id} costs"
            f" {prices.format_price(found.hourly)}",
            hint="renew it for a shorter time, or release other reservations",
        )


def _budget_limit(
    account: QuotaUsage, since: datetime, until: datetime, without: CostInterval | None = None
) -> BudgetLimit | None:
    most = account.max_hourly_price(since, until, without)
    return None if most is None else BudgetLimit(most, account.quota.currency)


def _violations(account: QuotaUsage, request: Request) -> Iterator[QuotaExceeded]:
    """One error with a hint for each limit that the request would exceed."""
    requester, most = request.requester, account.quota.reservations
    if most is not None and account.held_count + account.pending_count >= most:
        yield QuotaExceeded(
            f"{requester} has {account.held_count + account.pending_count} of {most} reservations,"
            " and one more would exceed its quota",
            hint="release a reservation, or wait until one ends",
        )
    for name, wanted in request.resources.items():
        cap = account.quota.amounts.get(name)
        if cap is None:
            continue
        has = account.held.amount(name) + account.pending.amount(name)
        if has + wanted > cap:
            less = f"request {resources.format_amount(name, has + wanted - cap)} {name} less"
            release = "release some of it, or wait until reservations end"
            message = _exceeded_message(account, requester, name, wanted)
            yield QuotaExceeded(message, hint=less if has < cap else release)


def _exceeded_message(account: QuotaUsage, requester: str, name: str, wanted: int) -> str:
    amounts = (account.held, account.pending)
    held, awaited = (resources.format_amount(name, one.amount(name)) for one in amounts)
    cap = resources.format_amount(name, account.quota.amounts[name])
    waits = f" and waits for {awaited}" if account.pending.amount(name) else ""
    more = resources.format_amount(name, wanted)
    return (
        f"{requester} holds {held}{waits} of {cap} {name}, and {more} more would exceed its quota"
    )
