"""Scoring: score functions, and policies as weights over them.

A score is a number per cluster, higher is better, about 0 to 1 for clusters that fit. A policy is a
record of weights; `tie_break` decides between equal totals, then the smaller cluster ID.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from kubelend.core.columns import Floats, Ints, Mask
from kubelend.core.errors import InvalidInput
from kubelend.core.filters import hourly_costs
from kubelend.core.fleet import UNPRICED, Fleet, FleetSubset, currency_code
from kubelend.core.models import Request

ScoredClusters = Fleet | FleetSubset
ScoreFunction = Callable[[Request, ScoredClusters, Mask], Floats]

SCORE_SCALE = 1e9

SUBSET_RATIO = 8
"""Only the feasible clusters are scored if they are fewer than one in this many."""


class ScoringPolicy(msgspec.Struct, frozen=True):
    """Weights by score name."""

    weights: Mapping[str, float]
    tie_break: Mapping[str, float] = {}


def policy_for(request: Request) -> ScoringPolicy:
    """The policy that a request names, or its own weights."""
    if request.weights:
        return ScoringPolicy(request.weights, tie_break={"headroom": 1.0})
    return SCORING_POLICIES[request.policy]


def check_policy(policy: str, weights: Mapping[str, float]) -> None:
    """Raises `InvalidInput` for an unknown policy or an invalid weight."""
    if policy not in SCORING_POLICIES:
        raise InvalidInput(
            f"policy: {policy[:40]!r} is unknown",
            hint=f"choose one of {', '.join(sorted(SCORING_POLICIES))}",
        )
    for name, weight in weights.items():
        if name not in SCORES:
            raise InvalidInput(
                f"weights: {name[:40]!r} is unknown",
                hint=f"choose from {', '.join(sorted(SCORES))}",
            )
        if not 0 <= weight <= 1000:
            raise InvalidInput(f"weights.{name}: {weight} is not between 0 and 1000")
    if weights and not any(weights.values()):
        raise InvalidInput("weights: all are zero", hint="give at least one a positive weight")


def headroom(request: Request, fleet: ScoredClusters, _: Mask) -> Floats:
    """The mean free share after placement, over the requested resources."""
    total, term = fleet.scratch(0), fleet.scratch(1)
    (first, wanted), *others = request.resources.items()
    _free_share_after(first, wanted, fleet, total)
    for name, wanted in others:
        total += _free_share_after(name, wanted, fleet, term)
    total *= 1 / (1 + len(others))
    return total


def packing(request: Request, fleet: ScoredClusters, feasible: Mask) -> Floats:
    """Bin packing, the opposite of headroom: fills one cluster first, so that large requests still fit."""
    total = headroom(request, fleet, feasible)
    np.subtract(1.0, total, out=total)
    return total


def balance(request: Request, fleet: ScoredClusters, _: Mask) -> Floats:
    """How even the free shares after placement are, so that no cluster is left with memory but no CPU."""
    most, least, term = fleet.scratch(0), fleet.scratch(2), fleet.scratch(1)
    most.fill(-np.inf)
    least.fill(np.inf)
    for name, wanted in request.resources.items():
        share = _free_share_after(name, wanted, fleet, term)
        np.maximum(most, share, out=most)
        np.minimum(least, share, out=least)
    most -= least
    np.subtract(1.0, most, out=most)
    return most


def price(request: Request, fleet: ScoredClusters, feasible: Mask) -> Floats:
    """1 for the cheapest feasible cluster, 0 for the most expensive; in between without a price in
    the currency of the request, or else in the most common one among feasible clusters.
    """
    costs = hourly_costs(request, fleet)
    named = request.constraints.currency
    code = currency_code(named) if named else _most_common_currency(fleet.currency[feasible])
    comparable = fleet.currency == code
    requested = costs[feasible & comparable]
    if not len(requested) or requested.min() == requested.max():
        costs.fill(1.0)
        return costs
    lowest, highest = requested.min(), requested.max()
    costs[~comparable] = (lowest + highest) / 2
    np.subtract(highest, costs, out=costs)
    costs /= highest - lowest
    return costs


def _most_common_currency(currencies: Ints) -> int:
    """Deterministic between equally common ones; UNPRICED if no cluster has prices."""
    requested = currencies[currencies != UNPRICED]
    if not len(requested) or (requested == requested[0]).all():
        return int(requested[0]) if len(requested) else UNPRICED
    found, counts = np.unique(requested, return_counts=True)
    return int(found[counts.argmax()])


SCORES: dict[str, ScoreFunction] = {
    "headroom": headroom,
    "packing": packing,
    "balance": balance,
    "price": price,
}

SCORING_POLICIES: dict[str, ScoringPolicy] = {
    "headroom": ScoringPolicy({"headroom": 1.0}),
    "binpack": ScoringPolicy({"packing": 1.0}),
    "cost": ScoringPolicy({"price": 1.0}, tie_break={"headroom": 1.0}),
    "balanced": ScoringPolicy({"headroom": 1.0, "balance": 1.0, "price": 1.0}),
}


class BestRow(NamedTuple):
    """A row of the fleet and its score."""

    row: int
    score: float


def best_row(request: Request, fleet: Fleet, feasible: Mask) -> BestRow | None:
    """The best feasible cluster, or None."""
    fitting = int(np.count_nonzero(feasible))
    if not fitting:
        return None
    if fitting * SUBSET_RATIO > len(fleet):
        return _best_scored_row(request, fleet, feasible)
    rows = np.flatnonzero(feasible)
    found = _best_scored_row(request, FleetSubset(fleet, rows), np.ones(fitting, np.bool_))
    return BestRow(int(rows[found.row]), found.score)


def _best_scored_row(request: Request, fleet: ScoredClusters, feasible: Mask) -> BestRow:
    policy = policy_for(request)
    totals = weighted_score(policy.weights, request, fleet, feasible)
    row = int(totals.argmax())
    if policy.tie_break or not feasible[row]:
        np.putmask(totals, ~feasible, -np.inf)
        row = int(totals.argmax())
    score = float(totals[row])
    if policy.tie_break:
        equals = totals == score
        totals = weighted_score(policy.tie_break, request, fleet, equals)
        np.putmask(totals, ~equals, -np.inf)
        row = int(totals.argmax())
    return BestRow(row, score / SCORE_SCALE)


def weighted_score(
    weights: Mapping[str, float], request: Request, fleet: ScoredClusters, feasible: Mask
) -> Floats:
    """The weighted mean of scores, in whole billionths.

    Rounded, so that 0.1 + 0.5 and 0.2 + 0.4 compare equal.
    """
    if len(weights) == 1:
        (name,) = weights
        total = SCORES[name](request, fleet, feasible)
        total *= SCORE_SCALE
    else:
        parts = [(name, weights[name]) for name in SCORES if weights.get(name)]
        total = fleet.scratch(3)
        total.fill(0.0)
        for name, weight in parts:
            total += SCORES[name](request, fleet, feasible) * weight
        total *= SCORE_SCALE / sum(weight for _, weight in parts)
    return np.rint(total, out=total)


def _free_share_after(name: str, wanted: int, fleet: ScoredClusters, out: Floats) -> Floats:
    shares = fleet.free_and_allocatable(name)
    if shares is None:
        out.fill(0.0)
        return out
    free, allocatable = shares
    np.subtract(free, wanted, out=out)
    return np.divide(out, allocatable, out=out)
