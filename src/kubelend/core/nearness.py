"""Distance of each cluster to a fit; the definition is in `explanations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kubelend.core import filters, prices
from kubelend.core.columns import Floats, Ints, Mask
from kubelend.core.filters import Purse, Question
from kubelend.core.fleet import UNPRICED, Fleet, currency_code
from kubelend.core.refusals import Refusal

Verdicts = Sequence[tuple[Refusal, Mask]]

_REQUIRED = ("cpu", "memory")
"""A request needs some of these and may do without all others."""
_HELPLESS = {
    Refusal.IS_REQUESTER,
    Refusal.LEFT_BEFORE,
    Refusal.REQUESTER_NOT_ALLOWED,
    Refusal.REQUESTER_DENIED,
    Refusal.STALE,
    Refusal.CORDONED,
}
"""Rejections that no change of the request avoids."""
_STEPS = {
    Refusal.NOT_PINNED,
    Refusal.EXCLUDED,
    Refusal.OUTSIDE_OPENING_HOURS,
    Refusal.HELD_FOR_WAITER,
}
_STEP = 0.5
_OTHER_CURRENCY = 1.0
_BILLION = 1e9


class Nearness(NamedTuple):
    """Distance of each cluster in billionths, for both ways to obtain the amounts."""

    less: Floats
    """Take what is free now."""
    later: Floats
    """Wait for the full amount; infinite if it is already free or never will be."""

    @property
    def distance(self) -> Floats:
        return np.minimum(self.less, self.later)


def measure(query: Question, fleet: Fleet, verdicts: Verdicts) -> Nearness:
    """The distance of each cluster to fitting."""
    rest = _rest(query, fleet)
    given_up = _given_up(query, fleet, rest)
    less = _steps(query, fleet, verdicts)
    later = less + _STEP
    later[(given_up == 0) | ~_fits_empty(query, fleet)] = np.inf
    less += given_up
    if query.request.constraints.max_price is not None or query.purse is not None:
        whole = filters.hourly(query.request, fleet)
        less += _dearness(query, fleet, whole, _costs(fleet, rest))
        later += _dearness(query, fleet, whole, whole)
    return Nearness(np.rint(less * _BILLION), np.rint(later * _BILLION))


def left(query: Question, fleet: Fleet, name: str) -> Ints | None:
    """What each cluster would lend to this requester now; None if no cluster offers the resource."""
    free, share = fleet.free(name), fleet.share_left(name, query.request.requester)
    return free if free is None or share is None else np.minimum(free, np.maximum(share, 0))


def is_foreign(purse: Purse, fleet: Fleet) -> Mask:
    """Clusters with prices in another currency than the budget."""
    code = currency_code(purse.currency)
    foreign: Mask = (fleet.currency != code) & (fleet.currency != UNPRICED)
    return foreign


def _steps(query: Question, fleet: Fleet, verdicts: Verdicts) -> Floats:
    """The distance from changes without an amount."""
    size = np.zeros(len(fleet), np.float64)
    for rejection, mask in verdicts:
        if rejection in _HELPLESS:
            size[~mask] = np.inf
        elif rejection in _STEPS:
            size[~mask] += _STEP
    for key, value in query.request.constraints.labels.items():
        size[~fleet.with_label(key, value)] += _STEP
    if query.purse is not None:
        size[is_foreign(query.purse, fleet)] = np.inf
    return size


def _rest(query: Question, fleet: Fleet) -> dict[str, Ints]:
    """The obtainable part of the request on each cluster, by resource."""
    rest = {}
    for name, wanted in query.request.resources.items():
        has = left(query, fleet, name)
        none = np.zeros(len(fleet), np.int64)
        rest[name] = none if has is None else np.minimum(has, wanted)
    return rest


def _given_up(query: Question, fleet: Fleet, rest: dict[str, Ints]) -> Floats:
    """The sum of the missing shares; infinite where the rest is not a valid request."""
    size, nothing = np.zeros(len(fleet), np.float64), np.ones(len(fleet), np.bool_)
    for name, has in rest.items():
        wanted = query.request.resources.amount(name)
        size += (wanted - has) / wanted
        nothing &= has == 0
        if name in _REQUIRED:
            size[has == 0] = np.inf
    size[nothing] = np.inf
    return size


def _fits_empty(query: Question, fleet: Fleet) -> Mask:
    """Clusters where the full request would fit if nothing were reserved."""
    fits = np.ones(len(fleet), np.bool_)
    for name, wanted in query.request.resources.items():
        ceiling, bound = fleet.ceiling(name), fleet.bound(name)
        fits &= ceiling is not None and ceiling >= wanted
        fits &= bound is None or bound.share[: len(fleet)] >= wanted
    return fits


def _costs(fleet: Fleet, amounts: dict[str, Ints]) -> Floats:
    """Hourly cost of the obtainable amounts, as `filters.hourly_costs`."""
    costs = np.zeros(len(fleet), np.float64)
    for name, rates in zip(("cpu", "memory", "gpu", "storage"), fleet.rates, strict=True):
        if name in amounts:
            costs += amounts[name] * rates
    return costs


def _dearness(query: Question, fleet: Fleet, whole: Floats, costs: Floats) -> Floats:
    """The share of the `whole` price by which these costs exceed what may be paid."""
    size, request = np.zeros(len(fleet), np.float64), query.request
    maximum = request.constraints.max_price
    if maximum is not None:
        comparable = filters.in_its_currency(request, fleet)
        size += np.where(comparable, _excess(costs, maximum, whole), 0)
        size[~comparable & (fleet.currency != UNPRICED)] += _OTHER_CURRENCY
        size[(size > 0) & (costs >= prices.CEILING)] = np.inf
    if query.purse is not None:
        size += _excess(costs, query.purse.most, whole)
    return size


def _excess(costs: Floats, most: int, whole: Floats) -> Floats:
    above = np.where(costs > prices.limit(most), costs - most / prices.BILLIONTHS, 0)
    return np.divide(above, whole, out=np.zeros_like(whole), where=whole > 0)
