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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from kubelend.core import filters, prices, resources, scoring
from kubelend.core.columns import Floats, Ints, Mask
from kubelend.core.errors import NoCapacity, QuotaExceeded
from kubelend.core.filters import BudgetLimit, PlacementQuery
from kubelend.core.fleet import UNPRICED, Fleet, currency_code
from kubelend.core.lifecycle import Rejection
from kubelend.core.models import ClusterId, Request
from kubelend.core.resources import NOTHING, Resources

FilterMasks = Sequence[tuple[Rejection, Mask]]

_REQUIRED_RESOURCES = ("cpu", "memory")
"""A request needs some of these and may do without all others."""
_UNFIXABLE = {
    Rejection.IS_REQUESTER,
    Rejection.LEFT_BEFORE,
    Rejection.REQUESTER_NOT_ALLOWED,
    Rejection.REQUESTER_DENIED,
    Rejection.STALE,
    Rejection.CORDONED,
}
"""Rejections that no change of the request avoids."""
_FIXED_COST_REJECTIONS = {
    Rejection.NOT_PINNED,
    Rejection.EXCLUDED,
    Rejection.OUTSIDE_OPENING_HOURS,
    Rejection.HELD_FOR_WAITER,
}
_FIXED_COST = 0.5
_OTHER_CURRENCY_COST = 1.0
_DISTANCE_SCALE = 1e9


class Distance(NamedTuple):
    """Distance of each cluster in billionths, for both ways to obtain the amounts."""

    reduced: Floats
    """Take what is free now."""
    waiting: Floats
    """Wait for the full amount; infinite if it is already free or never will be."""

    @property
    def nearest(self) -> Floats:
        return np.minimum(self.reduced, self.waiting)


def distances(query: PlacementQuery, fleet: Fleet, masks: FilterMasks) -> Distance:
    """The distance of each cluster to fitting."""
    rest = _obtainable(query, fleet)
    given_up = _missing_share(query, fleet, rest)
    less = _fixed_costs(query, fleet, masks)
    later = less + _FIXED_COST
    later[(given_up == 0) | ~_fits_empty(query, fleet)] = np.inf
    less += given_up
    if query.request.constraints.max_price is not None or query.budget is not None:
        whole = filters.hourly_costs(query.request, fleet)
        less += _excess_share(query, fleet, whole, _obtainable_costs(fleet, rest))
        later += _excess_share(query, fleet, whole, whole)
    return Distance(np.rint(less * _DISTANCE_SCALE), np.rint(later * _DISTANCE_SCALE))


def lendable_now(query: PlacementQuery, fleet: Fleet, name: str) -> Ints | None:
    """What each cluster would lend to this requester now; None if no cluster offers the resource."""
    free, share = fleet.free(name), fleet.requester_cap_left(name, query.request.requester)
    return free if free is None or share is None else np.minimum(free, np.maximum(share, 0))


def in_other_currency(budget: BudgetLimit, fleet: Fleet) -> Mask:
    """Clusters with prices in another currency than the budget."""
    code = currency_code(budget.currency)
    foreign: Mask = (fleet.currency != code) & (fleet.currency != UNPRICED)
    return foreign


def _fixed_costs(query: PlacementQuery, fleet: Fleet, masks: FilterMasks) -> Floats:
    """The distance from changes without an amount."""
    size = np.zeros(len(fleet), np.float64)
    for rejection, mask in masks:
        if rejection in _UNFIXABLE:
            size[~mask] = np.inf
        elif rejection in _FIXED_COST_REJECTIONS:
            size[~mask] += _FIXED_COST
    for key, value in query.request.constraints.labels.items():
        size[~fleet.with_label(key, value)] += _FIXED_COST
    if query.budget is not None:
        size[in_other_currency(query.budget, fleet)] = np.inf
    return size


def _obtainable(query: PlacementQuery, fleet: Fleet) -> dict[str, Ints]:
    """The obtainable part of the request on each cluster, by resource."""
    rest = {}
    for name, wanted in query.request.resources.items():
        has = lendable_now(query, fleet, name)
        none = np.zeros(len(fleet), np.int64)
        rest[name] = none if has is None else np.minimum(has, wanted)
    return rest


def _missing_share(query: PlacementQuery, fleet: Fleet, rest: dict[str, Ints]) -> Floats:
    """The sum of the missing shares; infinite where the rest is not a valid request."""
    size, nothing = np.zeros(len(fleet), np.float64), np.ones(len(fleet), np.bool_)
    for name, has in rest.items():
        wanted = query.request.resources.amount(name)
        size += (wanted - has) / wanted
        nothing &= has == 0
        if name in _REQUIRED_RESOURCES:
            size[has == 0] = np.inf
    size[nothing] = np.inf
    return size


def _fits_empty(query: PlacementQuery, fleet: Fleet) -> Mask:
    """Clusters where the full request would fit if nothing were reserved."""
    fits = np.ones(len(fleet), np.bool_)
    for name, wanted in query.request.resources.items():
        ceiling, bound = fleet.ceiling(name), fleet.limit_column(name)
        fits &= ceiling is not None and ceiling >= wanted
        fits &= bound is None or bound.requester_cap[: len(fleet)] >= wanted
    return fits


def _obtainable_costs(fleet: Fleet, amounts: dict[str, Ints]) -> Floats:
    """Hourly cost of the obtainable amounts, as `filters.hourly_costs`."""
    costs = np.zeros(len(fleet), np.float64)
    for name, rates in zip(("cpu", "memory", "gpu", "storage"), fleet.rates, strict=True):
        if name in amounts:
            costs += amounts[name] * rates
    return costs


def _excess_share(query: PlacementQuery, fleet: Fleet, whole: Floats, costs: Floats) -> Floats:
    """The share of the `whole` price by which these costs exceed what may be paid."""
    size, request = np.zeros(len(fleet), np.float64), query.request
    maximum = request.constraints.max_price
    if maximum is not None:
        comparable = filters.in_request_currency(request, fleet)
        size += np.where(comparable, _excess(costs, maximum, whole), 0)
        size[~comparable & (fleet.currency != UNPRICED)] += _OTHER_CURRENCY_COST
        size[(size > 0) & (costs >= prices.MAX_UNIT_PRICE)] = np.inf
    if query.budget is not None:
        size += _excess(costs, query.budget.max_hourly_price, whole)
    return size


def _excess(costs: Floats, most: int, whole: Floats) -> Floats:
    above = np.where(costs > prices.max_price_limit(most), costs - most / prices.BILLIONTHS, 0)
    return np.divide(above, whole, out=np.zeros_like(whole), where=whole > 0)


class Suggestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The smallest change to the request that would make it fit a cluster."""

    cluster: ClusterId
    text: str
    less: Resources = NOTHING
    max_price: int | None = None
    currency: str = ""
    """Currency of `max_price`: that of the cluster, which may differ from that of the request."""
    drop_labels: dict[str, str] = {}


def suggest_change(
    query: PlacementQuery, fleet: Fleet, row: int, rejections: tuple[Rejection, ...], near: Distance
) -> Suggestion | None:
    """The change that would make a rejected cluster fit; None if there is none."""
    way = _best_option(query, fleet, row, near) if rejections else None
    opening = _opening_steps(query, fleet, row, rejections)
    if way is None or opening is None:
        return None
    labels = _missing_labels(query, fleet, row)
    steps = [_STEP_TEXTS[rejection] for rejection in rejections if rejection in _STEP_TEXTS]
    steps += [*opening, *_budget_steps(query, way.price_check), *_amount_steps(way)]
    price, in_currency = way.price_check.price, ""
    if price is not None:
        in_currency = currency_of(fleet, row)
        steps.append(f"allow {prices.format_price(price)} {in_currency} per hour")
    steps += [f"drop the label {key}={value}" for key, value in labels.items()]
    text = f"{fleet.ids[row]} fits if you {' and '.join(steps)}"
    return Suggestion(fleet.ids[row], text, way.less, price, in_currency, labels)


def currency_of(fleet: Fleet, row: int) -> str:
    """Currency of a cluster's prices; empty if it has none."""
    code = int(fleet.currency[row])
    return "" if code == UNPRICED else code.to_bytes(8).lstrip(b"\0").decode("ascii")


_STEP_TEXTS = {
    Rejection.NOT_PINNED: "remove the pin to another cluster",
    Rejection.EXCLUDED: "remove its exclusion",
    Rejection.HELD_FOR_WAITER: "wait, or use a higher priority",
}


class _PriceCheck(NamedTuple):
    """Result of the price and budget checks."""

    price: int | None = None
    """The smallest maximum price that passes; None if the current one passes."""
    is_over_budget: bool = False


class _AmountOption(NamedTuple):
    """How to obtain the amounts: by requesting less, by waiting, or by either."""

    less: Resources
    waits: bool
    price_check: _PriceCheck


def _best_option(
    query: PlacementQuery, fleet: Fleet, row: int, near: Distance
) -> _AmountOption | None:
    """The option with the smaller distance; or both, if the price is the same."""
    less, later = float(near.reduced[row]), float(near.waiting[row])
    if np.isinf(less) and np.isinf(later):
        return None
    missing = query.request.resources.shortfall(_lendable_row(query, fleet, row))
    reduced = _check_price(query, fleet, row, missing)
    if np.isinf(later):
        return _AmountOption(missing, False, reduced)
    in_full = _check_price(query, fleet, row, NOTHING)
    if np.isinf(less) or (later < less and reduced != in_full):
        return _AmountOption(NOTHING, True, in_full)
    return _AmountOption(missing, reduced == in_full, reduced)


def _lendable_row(query: PlacementQuery, fleet: Fleet, row: int) -> Resources:
    amounts = {}
    for name, _ in query.request.resources.items():  # noqa: PERF102 - not a dict: it has no keys()
        left = lendable_now(query, fleet, name)
        amounts[name] = 0 if left is None else int(left[row])
    return Resources.of(amounts)


def _check_price(query: PlacementQuery, fleet: Fleet, row: int, less: Resources) -> _PriceCheck:
    """Checks the price of the reduced request."""
    if query.request.constraints.max_price is None and query.budget is None:
        return _PriceCheck()
    rest = replace(query.request, resources=query.request.resources - less)
    reduced = replace(query, request=rest)
    within = filters.within_budget(reduced, fleet)
    return _PriceCheck(_price_needed(reduced, fleet, row), within is not None and not within[row])


def _price_needed(query: PlacementQuery, fleet: Fleet, row: int) -> int | None:
    known, constraints = fleet.prices[row], query.request.constraints
    if known is None or constraints.max_price is None or _is_price_accepted(query, fleet, row):
        return None
    rounded = known.hourly_cost(query.request.resources)
    allowed = replace(constraints, max_price=rounded, currency=known.currency)
    request = replace(query.request, constraints=allowed)
    is_enough = _is_price_accepted(replace(query, request=request), fleet, row)
    return rounded if is_enough else rounded + 1


def _is_price_accepted(query: PlacementQuery, fleet: Fleet, row: int) -> bool:
    masks = filters.same_currency(query, fleet), filters.within_max_price(query, fleet)
    return all(mask is None or mask[row] for mask in masks)


def _opening_steps(
    query: PlacementQuery, fleet: Fleet, row: int, rejections: tuple[Rejection, ...]
) -> list[str] | None:
    """The step for opening hours; None if the cluster never opens."""
    if Rejection.OUTSIDE_OPENING_HOURS not in rejections or fleet.policy_columns is None:
        return []
    opens = fleet.policy_columns.opening_hours.next_opening(row, query.now)
    return None if opens is None else [f"wait until it opens at {opens:%Y-%m-%dT%H:%MZ}"]


def _budget_steps(query: PlacementQuery, bill: _PriceCheck) -> Iterator[str]:
    if query.budget is not None and bill.is_over_budget:
        left = f"{prices.format_price(query.budget.max_hourly_price)} {query.budget.currency}"
        yield f"request less, or for a shorter time (your budget leaves {left} per hour)"


def _amount_steps(way: _AmountOption) -> Iterator[str]:
    wait = "wait until reservations there end"
    if way.less:
        amounts = " and ".join(
            f"{resources.format_amount(*part)} {part[0]}" for part in way.less.items()
        )
        yield f"request {amounts} less, or {wait}" if way.waits else f"request {amounts} less"
    elif way.waits:
        yield wait


def _missing_labels(query: PlacementQuery, fleet: Fleet, row: int) -> dict[str, str]:
    has = fleet.labels[row]
    wanted = query.request.constraints.labels
    return {key: value for key, value in wanted.items() if has.get(key) != value}


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
        reason = ", ".join(f"{count} {rejection}" for rejection, count in counts)
        noun = "cluster fits" if self.total == 1 else "clusters fit"
        unknown = "" if self.unknown is None else f"; cluster {self.unknown!r} is unknown"
        return f"{self.fitting}/{self.total} {noun}" + (f": {reason}" if reason else "") + unknown


def no_capacity_error(explanation: Explanation) -> NoCapacity:
    """The explanation as an error, for callers that requested a placement."""
    hint = "" if explanation.suggestion is None else explanation.suggestion.text
    return NoCapacity(f"no suitable cluster: {explanation}", hint=hint, explanation=explanation)


def explain_placement(query: PlacementQuery, fleet: Fleet, limit: int) -> Explanation:
    """Counts the rejections of all clusters and details the first `limit` candidates."""
    masks = list(filters.filter_masks(query, fleet))
    feasible, rejections = _count_rejections(masks, len(fleet))
    near = distances(query, fleet, masks)
    pinned = query.request.constraints.pinned
    return Explanation(
        total=len(fleet),
        fitting=int(feasible.sum()),
        rejections=rejections,
        candidates=_candidates(query, fleet, masks, feasible, near, limit),
        suggestion=None if feasible.any() else _nearest_suggestion(query, fleet, masks, near),
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


def _candidates(
    query: PlacementQuery,
    fleet: Fleet,
    masks: FilterMasks,
    feasible: Mask,
    near: Distance,
    limit: int,
) -> tuple[Candidate, ...]:
    if not limit or not len(fleet):
        return ()
    request = query.request
    weights = scoring.policy_for(request).weights
    scores = scoring.weighted_score(weights, request, fleet, feasible) / scoring.SCORE_SCALE
    hourly = filters.hourly_costs(request, fleet)
    merit = np.where(feasible, -scores, near.nearest)
    order = np.lexsort((_tie_break_order(request, fleet, feasible), merit, ~feasible))[:limit]
    return tuple(
        _candidate(query, fleet, masks, near, int(row), float(scores[row]), float(hourly[row]))
        for row in order
    )


def _tie_break_order(request: Request, fleet: Fleet, feasible: Mask) -> Floats:
    """The tie-break of `scoring.best_row`, so that the first candidate is the chosen cluster."""
    then = scoring.policy_for(request).tie_break
    if not then:
        return np.zeros(len(fleet), np.float64)
    return np.where(feasible, -scoring.weighted_score(then, request, fleet, feasible), 0.0)


def _candidate(
    query: PlacementQuery,
    fleet: Fleet,
    masks: FilterMasks,
    near: Distance,
    row: int,
    score: float,
    hourly: float,
) -> Candidate:
    rejections = tuple(rejection for rejection, mask in masks if not mask[row])
    currency = currency_of(fleet, row)
    return Candidate(
        fleet.ids[row],
        rejections,
        score=None if rejections else score,
        price=hourly if currency else None,
        currency=currency,
        suggestion=suggest_change(query, fleet, row, rejections, near),
    )


def _nearest_suggestion(
    query: PlacementQuery, fleet: Fleet, masks: FilterMasks, near: Distance
) -> Suggestion | None:
    distance = near.nearest
    for _ in range(min(_MAX_SUGGESTION_ATTEMPTS, len(fleet))):
        row = int(distance.argmin())
        if not np.isfinite(distance[row]):
            return None
        rejections = tuple(rejection for rejection, mask in masks if not mask[row])
        found = suggest_change(query, fleet, row, rejections, near)
        if found is not None:
            return found
        distance[row] = np.inf
    return None


_MAX_SUGGESTION_ATTEMPTS = 8
"""Some of the nearest clusters may have no suggestion, for example those that never open."""
