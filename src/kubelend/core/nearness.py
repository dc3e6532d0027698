"""Distance of each cluster to a fit; the definition is in `explanations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kubelend.core import filters, prices
from kubelend.core.columns import Floats, Ints, Mask
from kubelend.core.filters import BudgetLimit, PlacementQuery
from kubelend.core.fleet import UNPRICED, Fleet, currency_code
from kubelend.core.refusals import Rejection

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


def distances(query: PlacementQuery, fleet: Fleet, verdicts: FilterMasks) -> Distance:
    """The distance of each cluster to fitting."""
    rest = _obtainable(query, fleet)
    given_up = _missing_share(query, fleet, rest)
    less = _fixed_costs(query, fleet, verdicts)
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


def in_other_currency(purse: BudgetLimit, fleet: Fleet) -> Mask:
    """Clusters with prices in another currency than the budget."""
    code = currency_code(purse.currency)
    foreign: Mask = (fleet.currency != code) & (fleet.currency != UNPRICED)
    return foreign


def _fixed_costs(query: PlacementQuery, fleet: Fleet, verdicts: FilterMasks) -> Floats:
    """The distance from changes without an amount."""
    size = np.zeros(len(fleet), np.float64)
    for rejection, mask in verdicts:
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
