"""The decision again, as plainly as it can be said: loops over records, no arrays, no index.

It shares nothing with the engine but the records and the order of floating-point operations, so both
must agree to the last bit. Slow, and meant to be read beside contract.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from kubelend.core.filters import Question
from kubelend.core.ledger import Ledger
from kubelend.core.models import Cluster, ClusterId, Request, Reservation
from kubelend.core.refusals import Refusal
from kubelend.core.resources import Resources

Free = dict[ClusterId, Resources]

POLICIES: dict[str, tuple[dict[str, float], bool]] = {
    "headroom": ({"headroom": 1.0}, False),
    "binpack": ({"packing": 1.0}, False),
    "cost": ({"price": 1.0}, True),
    "balanced": ({"headroom": 1.0, "balance": 1.0, "price": 1.0}, False),
}
"""Weights, and whether headroom decides between equals before the smaller ID does."""


def decide(question: Question, ledger: Ledger) -> tuple[ClusterId, float] | None:
    """The chosen cluster and its score, or None."""
    fitting = [
        cluster
        for _, cluster in sorted(ledger.clusters.items())
        if not refusals(question, cluster, ledger)
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


def refusals(question: Question, cluster: Cluster, ledger: Ledger) -> list[Refusal]:
    """Every reason why this cluster cannot serve the request, in the order of reporting."""
    return [
        *_by_identity(question, cluster),
        *_by_state(question.now, cluster),
        *_by_constraints(question.request, cluster),
        *_by_amounts(question.request.resources, ledger.available(cluster.id)),
        *_by_earmark(question, cluster, ledger.waiting()),
    ]


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
    asked = [price(request, other) for other in fitting if _comparable(request, other)]
    if not asked or min(asked) == max(asked):
        return 1.0
    cheapest, dearest = min(asked), max(asked)
    neutral = (cheapest + dearest) / 2
    own = price(request, cluster) if _comparable(request, cluster) else neutral
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


def _by_identity(question: Question, cluster: Cluster) -> list[Refusal]:
    constraints = question.request.constraints
    found = []
    if cluster.id == question.request.requester:
        found.append(Refusal.IS_REQUESTER)
    if constraints.pinned is not None and cluster.id != constraints.pinned:
        found.append(Refusal.NOT_PINNED)
    if cluster.id in constraints.excluded:
        found.append(Refusal.EXCLUDED)
    if cluster.id in question.left:
        found.append(Refusal.REFUSED_BEFORE)
    return found


def _by_state(now: datetime, cluster: Cluster) -> list[Refusal]:
    found = []
    if now >= cluster.valid_until:
        found.append(Refusal.STALE)
    if cluster.cordon is not None:
        found.append(Refusal.CORDONED)
    return found


def _by_constraints(request: Request, cluster: Cluster) -> list[Refusal]:
    constraints, offer = request.constraints, cluster.advertisement
    found = []
    if any(offer.labels.get(key) != value for key, value in constraints.labels.items()):
        found.append(Refusal.LABEL_MISMATCH)
    if constraints.max_price is None or offer.prices is None:
        return found
    if offer.prices.currency != constraints.currency:
        found.append(Refusal.CURRENCY_MISMATCH)
    elif price(request, cluster) > constraints.max_price / 10**9 * (1 + 1e-12):
        found.append(Refusal.TOO_EXPENSIVE)
    return found


def _by_amounts(wanted: Resources, available: Resources) -> list[Refusal]:
    named = [
        (wanted.cpu, available.cpu, Refusal.INSUFFICIENT_CPU),
        (wanted.memory, available.memory, Refusal.INSUFFICIENT_MEMORY),
        (wanted.gpu, available.gpu, Refusal.INSUFFICIENT_GPU),
        (wanted.storage, available.storage, Refusal.INSUFFICIENT_STORAGE),
    ]
    found = [refusal for asked, free, refusal in named if asked and asked > free]
    if any(asked > available.extended.get(name, 0) for name, asked in wanted.extended.items()):
        found.append(Refusal.INSUFFICIENT_EXTENDED)
    return found


def _by_earmark(question: Question, cluster: Cluster, waiting: list[Reservation]) -> list[Refusal]:
    """Kept for somebody of higher priority, or of the same priority and older."""
    rank = (-question.request.priority, question.ticket)
    return [
        Refusal.HELD_FOR_WAITER
        for waiter in waiting
        if waiter.earmark == cluster.id and (-waiter.request.priority, waiter.ticket) < rank
    ]


def _comparable(request: Request, cluster: Cluster) -> bool:
    prices = cluster.advertisement.prices
    return prices is not None and prices.currency == request.constraints.currency


def _shares_left(request: Request, cluster: Cluster, free: Resources) -> list[float]:
    allocatable = cluster.advertisement.allocatable
    return [
        (float(free.amount(name)) - float(wanted)) / float(allocatable.amount(name) or 1)
        for name, wanted in request.resources.items()
    ]
