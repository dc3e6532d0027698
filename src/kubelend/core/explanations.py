"""Placement decisions and their explanations: rejection reasons per cluster, and a suggested change with
which the request would fit.

One explanation serves REST, the command line, conditions and the dashboard, so that all show the
same text. It uses the filters of the placement; a property test checks that they never disagree.

The suggestion is for the nearest cluster. The distance of a cluster is the largest missing share of
a requested amount, and 1/2 for each other rejection; of equal ones the smaller ID is nearer. A
changed request is valid: requested CPU and memory stay above zero, and the maximum price can be
represented.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from kubelend.core import filters, prices, resources, scoring
from kubelend.core.columns import Floats, Mask
from kubelend.core.errors import NoCapacity, QuotaExceeded
from kubelend.core.filters import PlacementQuery
from kubelend.core.fleet import Fleet
from kubelend.core.lifecycle import INSUFFICIENT_AMOUNT, Rejection
from kubelend.core.models import ClusterId, Request
from kubelend.core.resources import NOTHING, Resources

FilterMasks = Sequence[tuple[Rejection, Mask]]

_UNFIXABLE = {
    Rejection.IS_REQUESTER,
    Rejection.PREVIOUS_PROVIDER,
    Rejection.REQUESTER_NOT_ALLOWED,
    Rejection.REQUESTER_DENIED,
    Rejection.STALE,
    Rejection.CORDONED,
}
"""Rejections that no change of the request avoids."""
_STEP_TEXTS = {
    Rejection.NOT_PINNED: "remove the pin to another cluster",
    Rejection.EXCLUDED: "remove its exclusion",
    Rejection.NOMINATED_FOR_OTHER: "wait, or use a higher priority",
}
_WAIT_STEP = "wait until reservations there end"
_MAX_SUGGESTION_ATTEMPTS = 8
"""Some of the nearest clusters may have no suggestion, for example those that never open."""


class Suggestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of the request with which it would fit a cluster."""

    cluster: ClusterId
    text: str
    less: Resources = NOTHING
    max_price: int | None = None
    currency: str = ""
    """Currency of `max_price`: that of the cluster, which may differ from that of the request."""
    drop_labels: dict[str, str] = {}


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
    """Number of clusters by their first rejection; with `fitting` they add up to `total`."""
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
        reason = ", ".join(f"{count} {rejection}" for rejection, count in counts)
        noun = "cluster fits" if self.total == 1 else "clusters fit"
        unknown = "" if self.unknown is None else f"; cluster {self.unknown!r} is unknown"
        return f"{self.fitting}/{self.total} {noun}" + (f": {reason}" if reason else "") + unknown


class ExplainOthers(StrEnum):
    """What a requester may learn about the other clusters. The values are API: a setting of the broker."""

    NAMES = "names"
    COUNTS = "counts"
    NONE = "none"

    def reduce(self, found: Explanation) -> Explanation:
        """Removes the names, or everything but whether the request fits."""
        if self is ExplainOthers.NAMES:
            return found
        if self is ExplainOthers.NONE:
            return Explanation(min(found.total, 1), min(found.fitting, 1), {}, quota=found.quota)
        suggestion = found.suggestion
        if suggestion is not None:
            text = suggestion.text.replace(suggestion.cluster, "a cluster", 1)
            suggestion = replace(suggestion, cluster=ClusterId(""), text=text)
        return replace(found, candidates=(), suggestion=suggestion)


def no_capacity_error(explanation: Explanation) -> NoCapacity:
    """The explanation as an error, for callers that requested a placement."""
    hint = "" if explanation.suggestion is None else explanation.suggestion.text
    return NoCapacity(f"no suitable cluster: {explanation}", hint=hint, explanation=explanation)


def explain_placement(query: PlacementQuery, fleet: Fleet, limit: int) -> Explanation:
    """Counts the rejections of all clusters and details the first `limit` candidates."""
    masks = list(filters.filter_masks(query, fleet))
    feasible, rejections = _count_rejections(masks, len(fleet))
    distances = _distances(query.request, fleet, masks)
    pinned = query.request.constraints.pinned
    return Explanation(
        total=len(fleet),
        fitting=int(feasible.sum()),
        rejections=rejections,
        candidates=_candidates(query, fleet, masks, feasible, distances, limit),
        suggestion=None if feasible.any() else _nearest_suggestion(query, fleet, masks, distances),
        unknown=pinned if pinned is not None and fleet.find_row(pinned) is None else None,
    )


def _count_rejections(masks: FilterMasks, total: int) -> tuple[Mask, dict[Rejection, int]]:
    remaining, counts = np.ones(total, np.bool_), {}
    for rejection, mask in masks:
        refused = int((remaining & ~mask).sum())
        if refused:
            counts[rejection] = refused
        remaining &= mask
    return remaining, counts


def _distances(request: Request, fleet: Fleet, masks: FilterMasks) -> Floats:
    """The distance of each cluster; infinite if no change of the request helps."""
    distances = filters.missing_shares(request, fleet)
    for rejection, mask in masks:
        if rejection not in INSUFFICIENT_AMOUNT:
            distances[~mask] += np.inf if rejection in _UNFIXABLE else 0.5
    return distances


def _candidates(
    query: PlacementQuery,
    fleet: Fleet,
    masks: FilterMasks,
    feasible: Mask,
    distances: Floats,
    limit: int,
) -> tuple[Candidate, ...]:
    """The feasible clusters by score, then the others by distance."""
    if not limit or not len(fleet):
        return ()
    request, policy = query.request, scoring.policy_for(query.request)
    scores = scoring.weighted_score(policy.weights, request, fleet, feasible) / scoring.SCORE_SCALE
    merit = np.where(feasible, -scores, distances)
    keys: tuple[Floats | Mask, ...] = (merit, ~feasible)
    if (
        policy.tie_break
    ):  # as in `scoring.best_row`, so that the first candidate is the chosen cluster
        then = scoring.weighted_score(policy.tie_break, request, fleet, feasible)
        keys = (np.where(feasible, -then, 0.0), *keys)
    order = np.lexsort(keys)[:limit]
    hourly = filters.hourly_costs(request, fleet)
    return tuple(
        _candidate(query, fleet, masks, int(row), float(scores[row]), float(hourly[row]))
        for row in order
    )


def _candidate(
    query: PlacementQuery, fleet: Fleet, masks: FilterMasks, row: int, score: float, hourly: float
) -> Candidate:
    rejections = _rejections(masks, row)
    currency = _currency_of(fleet, row)
    return Candidate(
        fleet.ids[row],
        rejections,
        score=None if rejections else score,
        price=hourly if currency else None,
        currency=currency,
        suggestion=_suggest_change(query, fleet, row, rejections),
    )


def _nearest_suggestion(
    query: PlacementQuery, fleet: Fleet, masks: FilterMasks, distances: Floats
) -> Suggestion | None:
    distances = distances.copy()
    for _ in range(min(_MAX_SUGGESTION_ATTEMPTS, len(fleet))):
        row = int(distances.argmin())
        found = _suggest_change(query, fleet, row, _rejections(masks, row))
        if found is not None:
            return found
        distances[row] = np.inf
    return None


def _rejections(masks: FilterMasks, row: int) -> tuple[Rejection, ...]:
    return tuple(rejection for rejection, mask in masks if not mask[row])


class _CostCheck(NamedTuple):
    """What the cost of a request exceeds."""

    price: int | None
    """The smallest maximum price that passes; None if the current one passes."""
    is_over_budget: bool


def _suggest_change(
    query: PlacementQuery, fleet: Fleet, row: int, rejections: tuple[Rejection, ...]
) -> Suggestion | None:
    """The change that would make a rejected cluster fit; None if there is none."""
    request, currency = query.request, _currency_of(fleet, row)
    opening = _opening_steps(query, fleet, row, rejections)
    is_payable = query.budget is None or currency in {"", query.budget.currency}
    if not rejections or not _UNFIXABLE.isdisjoint(rejections) or opening is None or not is_payable:
        return None
    less = request.resources.shortfall(_lendable(request, fleet, row))
    may_wait = bool(less) and _fits_empty(request, fleet, row)
    if not _is_requestable(request.resources - less, request.resources):
        if not may_wait:
            return None
        less = NOTHING
    cost = _check_cost(query, fleet, row, less)
    if cost.price is not None and cost.price >= prices.MAX_UNIT_PRICE * prices.BILLIONTHS:
        return None
    waits = may_wait and cost == _check_cost(query, fleet, row, NOTHING)
    has, wanted = fleet.labels[row], request.constraints.labels
    labels = {key: value for key, value in wanted.items() if has.get(key) != value}
    steps = [_STEP_TEXTS[rejection] for rejection in rejections if rejection in _STEP_TEXTS]
    steps += opening
    if query.budget is not None and cost.is_over_budget:
        left = f"{prices.format_price(query.budget.max_hourly_price)} {query.budget.currency}"
        steps.append(f"request less, or for a shorter time (your budget leaves {left} per hour)")
    steps += _amount_steps(less, waits=waits)
    if cost.price is not None:
        steps.append(f"allow {prices.format_price(cost.price)} {currency} per hour")
    steps += [f"drop the label {key}={value}" for key, value in labels.items()]
    return Suggestion(
        fleet.ids[row],
        f"{fleet.ids[row]} fits if you {' and '.join(steps)}",
        less,
        cost.price,
        "" if cost.price is None else currency,
        labels,
    )


def _currency_of(fleet: Fleet, row: int) -> str:
    """Currency of a cluster's prices; empty if it has none."""
    known = fleet.prices[row]
    return "" if known is None else known.currency


def _lendable(request: Request, fleet: Fleet, row: int) -> Resources:
    """The part of the requested resources that a cluster would lend now."""
    columns = {
        name: fleet.lendable(name, request.requester) for name, _ in request.resources.items()
    }
    return Resources.of({n: 0 if has is None else int(has[row]) for n, has in columns.items()})


def _fits_empty(request: Request, fleet: Fleet, row: int) -> bool:
    """Whether the full request would fit a cluster if nothing were reserved."""
    for name, wanted in request.resources.items():
        ceiling, bound = fleet.ceiling(name), fleet.limit_column(name)
        if ceiling is None or ceiling[row] < wanted:
            return False
        if bound is not None and bound.requester_cap[row] < wanted:
            return False
    return True


def _is_requestable(rest: Resources, wanted: Resources) -> bool:
    """Whether the rest of a request is valid: it may do without all but CPU and memory."""
    return bool(rest and (rest.cpu or not wanted.cpu) and (rest.memory or not wanted.memory))


def _check_cost(query: PlacementQuery, fleet: Fleet, row: int, less: Resources) -> _CostCheck:
    """Checks the cost of the reduced request."""
    request = replace(query.request, resources=query.request.resources - less)
    within = filters.within_budget(replace(query, request=request), fleet)
    return _CostCheck(_price_needed(request, fleet, row), within is not None and not within[row])


def _price_needed(request: Request, fleet: Fleet, row: int) -> int | None:
    known, maximum = fleet.prices[row], request.constraints.max_price
    if known is None or maximum is None:
        return None
    cost = filters.hourly_costs(request, fleet)[row]
    is_same_currency = filters.in_request_currency(request, fleet)[row]
    if is_same_currency and cost <= prices.max_price_limit(maximum):
        return None
    rounded = known.hourly_cost(request.resources)
    return rounded if cost <= prices.max_price_limit(rounded) else rounded + 1


def _opening_steps(
    query: PlacementQuery, fleet: Fleet, row: int, rejections: tuple[Rejection, ...]
) -> list[str] | None:
    """The step for opening hours; None if the cluster never opens."""
    if Rejection.OUTSIDE_OPENING_HOURS not in rejections or fleet.policy_columns is None:
        return []
    opens = fleet.policy_columns.opening_hours.next_opening(row, query.now)
    return None if opens is None else [f"wait until it opens at {opens:%Y-%m-%dT%H:%MZ}"]


def _amount_steps(less: Resources, *, waits: bool) -> Iterator[str]:
    parts = (f"{resources.format_amount(*part)} {part[0]}" for part in less.items())
    if less:
        yield f"request {' and '.join(parts)} less" + (f", or {_WAIT_STEP}" if waits else "")
    elif waits:
        yield _WAIT_STEP


class Placement(msgspec.Struct, frozen=True):
    """The chosen cluster with its score."""

    cluster: ClusterId
    score: float


class NoFit(msgspec.Struct, frozen=True):
    """No cluster fits; the explanation has the reasons."""

    explanation: Explanation


def decide_placement(query: PlacementQuery, fleet: Fleet) -> Placement | NoFit:
    """The best cluster that fits, or the reasons why none does."""
    placement = choose_cluster(query, fleet)
    return placement or NoFit(explain_placement(query, fleet, limit=0))


def choose_cluster(query: PlacementQuery, fleet: Fleet) -> Placement | None:
    """The best cluster that fits, without an explanation if none does."""
    feasible = filters.feasible_clusters(query, fleet)
    best = scoring.best_row(query.request, fleet, feasible)
    return None if best is None else Placement(fleet.ids[best.row], best.score)
