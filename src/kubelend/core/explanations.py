"""Explanations: rejection reasons per cluster, distance of each cluster to a fit, suggested change.

One explanation serves REST, the command line, conditions and the dashboard, so that all show the
same text. It uses the filters of the placement; a property test checks that they never disagree.

The **distance** is the size of the change that would make a request fit a cluster: the sum of its
parts, each a share of the request:

- **less of a resource**: the missing amount as a share of the requested one. 1 of 4 cores is 1/4.
- **a higher maximum price**: the raise as a share of the full cost there. From 0.9 to 1 is 1/10 if
  it costs 1. Amounts that are given up are not paid for.
- **over budget**: likewise, the share by which the cost has to shrink.
- **a price in another currency**: 1, as the largest raise, because the prices cannot be compared.
- **a change without an amount**: 1/2 each. Dropping a label, a pin or an exclusion, or waiting: for
  reservations to end, for an opening, for requests of higher rank.

Requesting less to become cheaper is never a smaller change than allowing the price, because a share
of a resource saves at most the same share of the price; so it is not considered.

The changed request has to be valid: requested CPU and memory stay above zero, and the maximum price
can be represented. The distance is infinite if no change helps. Distances are whole billionths, as
scores are, so that 0.1 + 0.2 equals 0.3; of equally near clusters the one with the smaller ID is
first.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kubelend.core import filters, nearness, policies, remedies
from kubelend.core.columns import Floats, Mask
from kubelend.core.errors import NoCapacity, QuotaExceeded
from kubelend.core.filters import PlacementQuery
from kubelend.core.fleet import Fleet
from kubelend.core.models import ClusterId, Request
from kubelend.core.nearness import Distance, FilterMasks
from kubelend.core.refusals import Rejection
from kubelend.core.remedies import Suggestion


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one cluster fares for a request."""

    cluster: ClusterId
    rejections: tuple[Rejection, ...] = ()
    score: float | None = None
    price: float | None = None
    currency: str = ""
    suggestion: Suggestion | None = None


class Explanation(msgspec.Struct, frozen=True):
    """How all clusters fare for a request; `candidates` are the best and the nearest of them."""

    total: int
    fitting: int
    rejections: dict[Rejection, int]
    """Number of clusters by their first rejection reason; together with `fitting` they add up to
    `total`.
    """
    candidates: tuple[Candidate, ...] = ()
    suggestion: Suggestion | None = None
    quota: tuple[QuotaExceeded, ...] = ()
    """Limits of the requester's quota that the request would exceed, independent of the clusters."""
    unknown: ClusterId | None = None
    """The cluster that the request is pinned to, if no cluster of that name advertises."""

    def __str__(self) -> str:
        if not self.total:
            return "no cluster has advertised yet"
        counts = sorted(self.rejections.items(), key=lambda item: (-item[1], item[0]))
        why = ", ".join(f"{count} {rejection}" for rejection, count in counts)
        noun = "cluster fits" if self.total == 1 else "clusters fit"
        unknown = "" if self.unknown is None else f"; cluster {self.unknown!r} is unknown"
        return f"{self.fitting}/{self.total} {noun}" + (f": {why}" if why else "") + unknown


def no_capacity_error(explanation: Explanation) -> NoCapacity:
    """The explanation as an error, for callers that requested a placement."""
    hint = "" if explanation.suggestion is None else explanation.suggestion.text
    return NoCapacity(f"no suitable cluster: {explanation}", hint=hint, explanation=explanation)


def explain_placement(query: PlacementQuery, fleet: Fleet, limit: int) -> Explanation:
    """Counts the rejections of all clusters and details the first `limit` candidates."""
    verdicts = list(filters.filter_masks(query, fleet))
    feasible, rejections = _count_rejections(verdicts, len(fleet))
    near = nearness.distances(query, fleet, verdicts)
    pinned = query.request.constraints.pinned
    return Explanation(
        total=len(fleet),
        fitting=int(feasible.sum()),
        rejections=rejections,
        candidates=_candidates(query, fleet, verdicts, feasible, near, limit),
        suggestion=None if feasible.any() else _nearest_suggestion(query, fleet, verdicts, near),
        unknown=pinned if pinned is not None and fleet.find_row(pinned) is None else None,
    )


def _count_rejections(verdicts: FilterMasks, total: int) -> tuple[Mask, dict[Rejection, int]]:
    remaining, counts = np.ones(total, np.bool_), {}
    for rejection, mask in verdicts:
        refused = int((remaining & ~mask).sum())
        if refused:
            counts[rejection] = refused
        remaining &= mask
    return remaining, counts


def _candidates(
    query: PlacementQuery,
    fleet: Fleet,
    verdicts: FilterMasks,
    feasible: Mask,
    near: Distance,
    limit: int,
) -> tuple[Candidate, ...]:
    if not limit or not len(fleet):
        return ()
    request = query.request
    weights = policies.policy_for(request).weights
    scores = policies.weighted_score(weights, request, fleet, feasible) / policies.SCORE_SCALE
    hourly = filters.hourly_costs(request, fleet)
    merit = np.where(feasible, -scores, near.nearest)
    order = np.lexsort((_tie_break_order(request, fleet, feasible), merit, ~feasible))[:limit]
    return tuple(
        _candidate(query, fleet, verdicts, near, int(row), float(scores[row]), float(hourly[row]))
        for row in order
    )


def _tie_break_order(request: Request, fleet: Fleet, feasible: Mask) -> Floats:
    """The tie-break of `scoring.best_row`, so that the first candidate is the chosen cluster."""
    then = policies.policy_for(request).tie_break
    if not then:
        return np.zeros(len(fleet), np.float64)
    return np.where(feasible, -policies.weighted_score(then, request, fleet, feasible), 0.0)


def _candidate(
    query: PlacementQuery,
    fleet: Fleet,
    verdicts: FilterMasks,
    near: Distance,
    row: int,
    score: float,
    hourly: float,
) -> Candidate:
    rejections = tuple(rejection for rejection, mask in verdicts if not mask[row])
    currency = remedies.currency_of(fleet, row)
    return Candidate(
        fleet.ids[row],
        rejections,
        score=None if rejections else score,
        price=hourly if currency else None,
        currency=currency,
        suggestion=remedies.suggest_change(query, fleet, row, rejections, near),
    )


def _nearest_suggestion(
    query: PlacementQuery, fleet: Fleet, verdicts: FilterMasks, near: Distance
) -> Suggestion | None:
    distance = near.nearest
    for _ in range(min(_MAX_SUGGESTION_ATTEMPTS, len(fleet))):
        row = int(distance.argmin())
        if not np.isfinite(distance[row]):
            return None
        rejections = tuple(rejection for rejection, mask in verdicts if not mask[row])
        found = remedies.suggest_change(query, fleet, row, rejections, near)
        if found is not None:
            return found
        distance[row] = np.inf
    return None


_MAX_SUGGESTION_ATTEMPTS = 8
"""Some of the nearest clusters may have no suggestion, for example those that never open."""
