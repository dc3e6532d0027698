"""How large a change would make a request fit each cluster: what explanations call near.

The size of a change is the sum of its parts, each of them a share of the request as it was asked:

- **less of a resource**: what is given up, as a share of what was wanted. 1 of 4 cores is 1/4.
- **a higher maximum price**: the raise, as a share of what the whole request costs there. From 0.9 to 1
  is 1/10 if it costs 1. What is given up anyway is not paid for.
- **being over the budget**: in the same way, the share by which it has to become cheaper.
- **a price in another currency**: 1, as the highest raise, because nobody knows how much dearer it is.
- **anything that has no amount**: 1/2 each, as half of a resource. That is a label that is dropped, a pin or
  an exclusion that is lifted, and waiting: for reservations to end, for an opening, for who came before.

To ask for less until it is cheap enough is never a smaller change than to allow the price: a share of a
resource saves at most that share of the price. So it need not be looked for.

A change must end in a request that the broker takes: CPU and memory that were asked for stay above zero,
and a maximum can be written. What no change helps is infinitely far. Sizes are whole billionths, as scores
are, so that 0.1 + 0.2 is 0.3; of equally near clusters the first is the one with the smaller ID.
"""

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
"""Every request asks for some of these; it may do without all others."""
_HELPLESS = {
    Refusal.IS_REQUESTER,
    Refusal.LEFT_BEFORE,
    Refusal.REQUESTER_NOT_ALLOWED,
    Refusal.REQUESTER_DENIED,
    Refusal.STALE,
    Refusal.CORDONED,
}
"""Refusals that no other request of the same cluster would avoid."""
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
    """How large the change is for each cluster, in billionths, by both ways to get the amounts."""

    less: Floats
    """Take what is free now; the same as it is where all of it is free."""
    later: Floats
    """Wait for all of it; infinite where it is free already, and where it would never be."""

    @property
    def distance(self) -> Floats:
        return np.minimum(self.less, self.later)


def measure(question: Question, fleet: Fleet, verdicts: Verdicts) -> Nearness:
    """How near each cluster is to fitting."""
    rest = _rest(question, fleet)
    given_up = _given_up(question, fleet, rest)
    less = _steps(question, fleet, verdicts)
    later = less + _STEP
    later[(given_up == 0) | ~_fits_empty(question, fleet)] = np.inf
    less += given_up
    if question.request.constraints.max_price is not None or question.purse is not None:
        whole = filters.hourly(question.request, fleet)
        less += _dearness(question, fleet, whole, _costs(fleet, rest))
        later += _dearness(question, fleet, whole, whole)
    return Nearness(np.rint(less * _BILLION), np.rint(later * _BILLION))


def left(question: Question, fleet: Fleet, name: str) -> Ints | None:
    """What each cluster would lend to this requester now; None if no cluster offers it."""
    free, share = fleet.free(name), fleet.share_left(name, question.request.requester)
    return free if free is None or share is None else np.minimum(free, np.maximum(share, 0))


def is_foreign(purse: Purse, fleet: Fleet) -> Mask:
    """The clusters that want to be paid in a currency of which the budget has none."""
    code = currency_code(purse.currency)
    foreign: Mask = (fleet.currency != code) & (fleet.currency != UNPRICED)
    return foreign


def _steps(question: Question, fleet: Fleet, verdicts: Verdicts) -> Floats:
    """What has no amount: so much for each."""
    size = np.zeros(len(fleet), np.float64)
    for refusal, mask in verdicts:
        if refusal in _HELPLESS:
            size[~mask] = np.inf
        elif refusal in _STEPS:
            size[~mask] += _STEP
    for key, value in question.request.constraints.labels.items():
        size[~fleet.with_label(key, value)] += _STEP
    if question.purse is not None:
        size[is_foreign(question.purse, fleet)] = np.inf
    return size


def _rest(question: Question, fleet: Fleet) -> dict[str, Ints]:
    """What each cluster has of the request, by the name of the resource."""
    rest = {}
    for name, wanted in question.request.resources.items():
        has = left(question, fleet, name)
        none = np.zeros(len(fleet), np.int64)
        rest[name] = none if has is None else np.minimum(has, wanted)
    return rest


def _given_up(question: Question, fleet: Fleet, rest: dict[str, Ints]) -> Floats:
    """The sum of the missing shares; infinite where the rest is no request."""
    size, nothing = np.zeros(len(fleet), np.float64), np.ones(len(fleet), np.bool_)
    for name, has in rest.items():
        wanted = question.request.resources.amount(name)
        size += (wanted - has) / wanted
        nothing &= has == 0
        if name in _REQUIRED:
            size[has == 0] = np.inf
    size[nothing] = np.inf
    return size


def _fits_empty(question: Question, fleet: Fleet) -> Mask:
    """Where all of the request would fit if nothing were reserved."""
    fits = np.ones(len(fleet), np.bool_)
    for name, wanted in question.request.resources.items():
        ceiling, bound = fleet.ceiling(name), fleet.bound(name)
        fits &= ceiling is not None and ceiling >= wanted
        fits &= bound is None or bound.share[: len(fleet)] >= wanted
    return fits


def _costs(fleet: Fleet, amounts: dict[str, Ints]) -> Floats:
    """What each cluster asks per hour for its own amounts; as `filters.hourly` for the same of all."""
    costs = np.zeros(len(fleet), np.float64)
    for name, rates in zip(("cpu", "memory", "gpu", "storage"), fleet.rates, strict=True):
        if name in amounts:
            costs += amounts[name] * rates
    return costs


def _dearness(question: Question, fleet: Fleet, whole: Floats, costs: Floats) -> Floats:
    """By what share of the `whole` price these costs are above what may be paid."""
    size, request = np.zeros(len(fleet), np.float64), question.request
    maximum = request.constraints.max_price
    if maximum is not None:
        comparable = filters.in_its_currency(request, fleet)
        size += np.where(comparable, _excess(costs, maximum, whole), 0)
        size[~comparable & (fleet.currency != UNPRICED)] += _OTHER_CURRENCY
        size[(size > 0) & (costs >= prices.CEILING)] = np.inf
    if question.purse is not None:
        size += _excess(costs, question.purse.most, whole)
    return size


def _excess(costs: Floats, most: int, whole: Floats) -> Floats:
    above = np.where(costs > prices.limit(most), costs - most / prices.BILLIONTHS, 0)
    return np.divide(above, whole, out=np.zeros_like(whole), where=whole > 0)
