"""The decision again, as plainly as it can be said: loops over records, no arrays, no index.

It shares nothing with the engine but the records and the order of floating-point operations, so both
must agree to the last bit. Slow, and meant to be read beside contract.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, time, timedelta
from fnmatch import fnmatchcase
from fractions import Fraction
from zoneinfo import ZoneInfo

from kubelend.core.filters import PlacementQuery
from kubelend.core.ledger import Ledger
from kubelend.core.lending import LendingPolicy
from kubelend.core.lifecycle import Rejection
from kubelend.core.models import Cluster, ClusterId, Request, Reservation
from kubelend.core.resources import Resources

Free = dict[ClusterId, Resources]

POLICIES: dict[str, tuple[dict[str, float], bool]] = {
    "headroom": ({"headroom": 1.0}, False),
    "binpack": ({"packing": 1.0}, False),
    "cost": ({"price": 1.0}, True),
    "balanced": ({"headroom": 1.0, "balance": 1.0, "price": 1.0}, False),
}
"""Weights, and whether headroom decides between equals before the smaller ID does."""


def decide(question: PlacementQuery, ledger: Ledger) -> tuple[ClusterId, float] | None:
    """The chosen cluster and its score, or None."""
    fitting = [
        cluster
        for _, cluster in sorted(ledger.clusters.items())
        if not rejections(question, cluster, ledger)
    ]
    if not fitting:
        return None
    request = question.request
    free = {cluster.id: ledger.available(cluster.id).clamped() for cluster in fitting}
    weights, by_headroom = POLICIES[request.policy]
    if request.weights:
        weights, by_headroom = request.weights, True
    totals = {cluster.id: weigh(weights, request, cluster, fitting, free) for cluster in fitting}
    best = max(totals.values())
    equals = [cluster for cluster in fitting if totals[cluster.id] == best]
    if by_headroom:
        equals.sort(
            key=lambda cluster: -billionths(headroom(request, cluster, free[cluster.id]) * 1e9)
        )
    return equals[0].id, best


def rejections(question: PlacementQuery, cluster: Cluster, ledger: Ledger) -> list[Rejection]:
    """Every reason why this cluster cannot serve the request, in the order of reporting."""
    found = [
        *_by_identity(question, cluster),
        *_by_state(question.now, cluster),
        *_by_constraints(question.request, cluster),
        *_by_amounts(question.request.resources, ledger.available(cluster.id)),
        *_by_nomination(question, cluster, ledger.waiting()),
        *_by_policies(question, cluster, ledger),
        *_by_money(question, cluster),
    ]
    return [rejection for rejection in Rejection if rejection in found]


def price(request: Request, cluster: Cluster) -> float:
    """What the request costs there per hour, in the cluster's currency."""
    prices = cluster.advertisement.prices
    if prices is None:
        return 0.0
    asked = request.resources
    total = float(asked.cpu) * (prices.cpu / 10**9 / 1000)
    total += float(asked.memory) * (prices.memory / 10**9 / 10**9)
    total += float(asked.gpu) * (prices.gpu / 10**9)
    total += float(asked.storage) * (prices.storage / 10**9 / 10**9)
    return total


def headroom(request: Request, cluster: Cluster, free: Resources) -> float:
    shares = _shares_left(request, cluster, free)
    total = shares[0]
    for share in shares[1:]:
        total += share
    return total * (1 / len(shares))


def balance(request: Request, cluster: Cluster, free: Resources) -> float:
    shares = _shares_left(request, cluster, free)
    return 1.0 - (max(shares) - min(shares))


def cheapness(request: Request, cluster: Cluster, fitting: list[Cluster]) -> float:
    currency = request.constraints.currency or _commonest_currency(fitting)
    asked = [price(request, other) for other in fitting if _asks_in(currency, other)]
    if not asked or min(asked) == max(asked):
        return 1.0
    cheapest, dearest = min(asked), max(asked)
    neutral = (cheapest + dearest) / 2
    own = price(request, cluster) if _asks_in(currency, cluster) else neutral
    return (dearest - own) / (dearest - cheapest)


def weigh(
    weights: Mapping[str, float],
    request: Request,
    cluster: Cluster,
    fitting: list[Cluster],
    free: Free,
) -> float:
    scores = {
        "headroom": headroom(request, cluster, free[cluster.id]),
        "packing": 1.0 - headroom(request, cluster, free[cluster.id]),
        "balance": balance(request, cluster, free[cluster.id]),
        "price": cheapness(request, cluster, fitting),
    }
    used = [(score, weights[name]) for name, score in scores.items() if weights.get(name)]
    if len(weights) == 1:
        return billionths(used[0][0] * 1e9)
    total = 0.0
    for score, weight in used:
        total += score * weight
    return billionths(total * (1e9 / sum(weight for _, weight in used)))


def billionths(score: float) -> float:
    """Scores are compared to nine decimals."""
    return float(round(score)) / 1e9


def _by_identity(question: PlacementQuery, cluster: Cluster) -> list[Rejection]:
    constraints = question.request.constraints
    found = []
    if cluster.id == question.request.requester:
        found.append(Rejection.IS_REQUESTER)
    if constraints.pinned is not None and cluster.id != constraints.pinned:
        found.append(Rejection.NOT_PINNED)
    if cluster.id in constraints.excluded:
        found.append(Rejection.EXCLUDED)
    if cluster.id in question.excluded_before:
        found.append(Rejection.PREVIOUS_PROVIDER)
    return found


def _by_state(now: datetime, cluster: Cluster) -> list[Rejection]:
    found = []
    if now >= cluster.valid_until:
        found.append(Rejection.STALE)
    if cluster.cordon is not None:
        found.append(Rejection.CORDONED)
    return found


def _by_constraints(request: Request, cluster: Cluster) -> list[Rejection]:
    constraints, offer = request.constraints, cluster.advertisement
    found = []
    if any(offer.labels.get(key) != value for key, value in constraints.labels.items()):
        found.append(Rejection.LABEL_MISMATCH)
    if constraints.max_price is None or offer.prices is None:
        return found
    if offer.prices.currency != (constraints.currency or "USD"):
        found.append(Rejection.CURRENCY_MISMATCH)
    elif price(request, cluster) > constraints.max_price / 10**9 * (1 + 1e-12):
        found.append(Rejection.TOO_EXPENSIVE)
    return found


def _by_amounts(wanted: Resources, available: Resources) -> list[Rejection]:
    named = [
        (wanted.cpu, available.cpu, Rejection.INSUFFICIENT_CPU),
        (wanted.memory, available.memory, Rejection.INSUFFICIENT_MEMORY),
        (wanted.gpu, available.gpu, Rejection.INSUFFICIENT_GPU),
        (wanted.storage, available.storage, Rejection.INSUFFICIENT_STORAGE),
    ]
    found = [rejection for asked, free, rejection in named if asked and asked > free]
    if any(asked > available.extended.get(name, 0) for name, asked in wanted.extended.items()):
        found.append(Rejection.INSUFFICIENT_EXTENDED)
    return found


def _by_nomination(
    question: PlacementQuery, cluster: Cluster, waiting: list[Reservation]
) -> list[Rejection]:
    """Kept for somebody of higher priority, or of the same priority and older."""
    rank = (-question.request.priority, question.ticket)
    return [
        Rejection.NOMINATED_FOR_OTHER
        for waiter in waiting
        if waiter.nominated_cluster == cluster.id
        and (-waiter.request.priority, waiter.ticket) < rank
    ]


def policies(cluster: Cluster, ledger: Ledger) -> list[LendingPolicy]:
    """What the cluster says itself, and what an administrator says for it: both hold."""
    both = [cluster.advertisement.policy, ledger.limits(cluster.id).policy]
    return [policy for policy in both if policy is not None]


def _by_policies(question: PlacementQuery, cluster: Cluster, ledger: Ledger) -> Iterator[Rejection]:
    requester, wanted = question.request.requester, question.request.resources
    available, reserved = ledger.available(cluster.id), ledger.reserved(cluster.id)
    for policy in policies(cluster, ledger):
        if policy.allow and not is_named(requester, policy.allow):
            yield Rejection.REQUESTER_NOT_ALLOWED
        if is_named(requester, policy.deny):
            yield Rejection.REQUESTER_DENIED
        if not is_open((policy.hours,), question.now):
            yield Rejection.OUTSIDE_OPENING_HOURS
        has = sum((r.request.resources for r in lent_to(requester, cluster, ledger)), Resources())
        for name, amount in wanted.items():
            if available.amount(name) < amount:
                continue  # it is not there at all: nothing is withheld
            if available.amount(name) - policy.keep_back.amount(name) < amount:
                yield Rejection.KEPT_BACK
            if reserved.amount(name) + amount > policy.max_lent.get(name, math.inf):
                yield Rejection.LENDING_CAP_REACHED
            if has.amount(name) + amount > policy.max_per_requester.get(name, math.inf):
                yield Rejection.REQUESTER_CAP_REACHED


def is_named(name: str, names: tuple[str, ...]) -> bool:
    return name in names or any(fnmatchcase(name, pattern) for pattern in names)


def exceeds_quota(request: Request, ledger: Ledger, *, served: bool = False) -> bool:
    """Whether one more would be too much; one that is `served` counts among those who wait already."""
    quota = ledger.limits(request.requester).quota
    if quota is None:
        return False
    counted = [
        found
        for found in ledger.reservations.values()
        if found.requester == request.requester
        and (found.is_live or (found.phase == "Pending" and not served))
    ]
    has = sum((found.request.resources for found in counted), Resources())
    too_many = quota.reservations is not None and len(counted) + 1 > quota.reservations
    return too_many or any(
        has.amount(name) + wanted > quota.amounts.get(name, math.inf)
        for name, wanted in request.resources.items()
    )


def could_serve(waiter: Reservation, cluster: Cluster, ledger: Ledger) -> bool:
    """Whether a cluster that lends nothing to anybody else would have room for a waiter."""
    if exceeds_quota(waiter.request, ledger, served=True):
        return False
    has = sum(
        (r.request.resources for r in lent_to(waiter.requester, cluster, ledger)), Resources()
    )
    ceiling = cluster.ceiling
    return all(
        ceiling.amount(name) >= wanted
        and all(
            ceiling.amount(name) - policy.keep_back.amount(name) >= wanted
            and policy.max_lent.get(name, math.inf) >= wanted
            and policy.max_per_requester.get(name, math.inf) >= wanted + has.amount(name)
            for policy in policies(cluster, ledger)
        )
        for name, wanted in waiter.request.resources.items()
    )


def lent_to(requester: ClusterId, provider: Cluster, ledger: Ledger) -> list[Reservation]:
    """What a requester has of a provider now."""
    return [found for found in ledger.lent_by(provider.id) if found.requester == requester]


def is_open(lists: tuple[tuple[str, ...], ...], at: datetime) -> bool:
    """Whether each list of opening hours that is not empty has some that are open."""
    return all(any(_is_within(text, at) for text in texts) for texts in lists if texts)


_DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]


def _is_within(text: str, at: datetime) -> bool:
    """As a person would look it up: which days are meant, and from when to when on each of them."""
    days, times, zone = _parts(text)
    wall = at.astimezone(UTC if zone == "UTC" else ZoneInfo(zone)).replace(tzinfo=None)
    start, end = (timedelta(hours=int(t[:2]), minutes=int(t[3:])) for t in times.split("-"))
    for day in (wall.date(), wall.date() - timedelta(days=1)):
        midnight = datetime.combine(day, time())
        closes = end if end > start else end + timedelta(days=1)
        if _DAYS[day.weekday()] in days and midnight + start <= wall < midnight + closes:
            return True
    return False


def _parts(text: str) -> tuple[list[str], str, str]:
    """The days by name, the times, and the zone."""
    parts = text.split()
    days = [] if parts[0][0].isdigit() else parts.pop(0).split(",")
    zone = parts[1] if len(parts) > 1 else "UTC"
    if not days:
        return _DAYS, parts[0], zone
    found = []
    for part in days:
        first, _, last = part.partition("-")
        day = _DAYS.index(first)
        found.append(_DAYS[day])
        while _DAYS[day] != (last or first):
            day = (day + 1) % 7
            found.append(_DAYS[day])
    return found, parts[0], zone


def agreed(request: Request, cluster: Cluster) -> int:
    """What a reservation there is placed for: billionths per hour, rounded to the nearest."""
    prices, asked = cluster.advertisement.prices, request.resources
    if prices is None:
        return 0
    exact = Fraction(asked.cpu * prices.cpu, 1000) + asked.gpu * prices.gpu
    exact += Fraction(asked.memory * prices.memory + asked.storage * prices.storage, 10**9)
    return math.floor(exact + Fraction(1, 2))


def _by_money(question: PlacementQuery, cluster: Cluster) -> Iterator[Rejection]:
    budget, prices = question.budget, cluster.advertisement.prices
    if budget is None or prices is None:
        return
    if prices.currency != budget.currency:
        yield Rejection.CURRENCY_MISMATCH
    elif agreed(question.request, cluster) > budget.max_hourly_price:
        yield Rejection.OVER_BUDGET


def most_per_hour(
    ledger: Ledger,
    requester: ClusterId,
    since: datetime,
    until: datetime,
    without: Reservation | None = None,
) -> int | None:
    """What the budget leaves for each hour of a time, looked at day by day; None without a budget."""
    quota = ledger.limits(requester).quota
    if quota is None or quota.budget is None:
        return None
    most = []
    day = since.replace(hour=0, minute=0, second=0, microsecond=0)
    while day < until:
        next_day = day + timedelta(days=1)
        hours = _hours(since, until, day, next_day)
        spent = Fraction(0)
        for found in ledger.reservations.values():
            if found.requester == requester:
                cut = since if without is not None and found.id == without.id else None
                spent += spent_on(found, day, quota.currency, cut)
        most.append(math.floor((quota.budget - spent) / hours))
        day = next_day
    return max(min(most), 0)


def spent_on(
    found: Reservation, day: datetime, currency: str, until: datetime | None = None
) -> Fraction:
    """What of a reservation's cost falls on a day, in billionths; only that before `until`, if given."""
    parts = [(c.since, c.until, c.hourly, c.currency) for c in found.charges]
    if found.reserved_at is not None and found.expires_at is not None:
        ends = [found.expires_at, found.finished_at, until]
        end = min(moment for moment in ends if moment is not None)
        parts.append((found.reserved_at, end, found.hourly, found.currency))
    return sum(
        (
            _hours(since, end, day, day + timedelta(days=1)) * hourly
            for since, end, hourly, its_currency in parts
            if its_currency == currency
        ),
        Fraction(0),
    )


def _hours(since: datetime, until: datetime, start: datetime, end: datetime) -> Fraction:
    """How many hours both spans have in common."""
    common = max(min(until, end) - max(since, start), timedelta())
    return Fraction(common // timedelta(microseconds=1), 3_600_000_000)


def _asks_in(currency: str, cluster: Cluster) -> bool:
    prices = cluster.advertisement.prices
    return prices is not None and prices.currency == currency


def _commonest_currency(clusters: list[Cluster]) -> str:
    asked = sorted(
        cluster.advertisement.prices.currency
        for cluster in clusters
        if cluster.advertisement.prices is not None
    )
    return max(asked, key=asked.count, default="")


def _shares_left(request: Request, cluster: Cluster, free: Resources) -> list[float]:
    allocatable = cluster.advertisement.allocatable
    return [
        (float(free.amount(name)) - float(wanted)) / float(allocatable.amount(name) or 1)
        for name, wanted in request.resources.items()
    ]
