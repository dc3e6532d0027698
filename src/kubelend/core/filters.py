"""Filters: one function per rejection reason.

A filter returns the mask of clusters that pass, or None if it does not apply to the request, which
is the common case and free. `FILTERS` defines their order, in which rejections are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from kubelend.core import prices
from kubelend.core.bounds import Admission, Bounds
from kubelend.core.columns import HIGHEST, Floats, Ints, Mask
from kubelend.core.fleet import UNPRICED, Fleet, currency_code
from kubelend.core.instants import micros
from kubelend.core.models import UNCONSTRAINED, ClusterId, Request
from kubelend.core.refusals import INSUFFICIENT, Refusal
from kubelend.core.selections import Selection

NEWEST = HIGHEST
"""The ticket of a request that is not queued: every waiting request of the same priority ranks
above it.
"""


class Purse(NamedTuple):
    """The highest hourly price that a budget allows, in billionths of one currency."""

    most: int
    currency: str


class Question(msgspec.Struct, frozen=True):
    """A request to be placed, with its rank. `excluded_before` are previous providers, never tried
    again.
    """

    request: Request
    now: datetime
    ticket: int = NEWEST
    left: tuple[ClusterId, ...] = ()
    purse: Purse | None = None


Filter = Callable[[Question, Fleet], Mask | None]


def passing(query: Question, fleet: Fleet) -> Mask:
    """Clusters that pass every filter: the fast path of `filter_masks`."""
    request = query.request
    feasible = fleet.usable(micros(query.now))
    requester = fleet.find(request.requester)
    if requester is not None:
        feasible[requester] = False
    for name, wanted in request.resources.items():
        free = fleet.free(name)
        feasible &= False if free is None else free >= wanted
    if fleet.bounds is not None:
        _bind(feasible, query, fleet, fleet.bounds)
    is_plain = request.constraints is UNCONSTRAINED and query.purse is None
    for passes in _SELDOM if is_plain else _RARE:
        mask = passes(query, fleet)
        if mask is not None:
            feasible &= mask
    return feasible


def verdicts(query: Question, fleet: Fleet) -> Iterator[tuple[Refusal, Mask]]:
    """The mask of each filter that applies, with its rejection reason."""
    for rejection, passes in FILTERS:
        mask = passes(query, fleet)
        if mask is not None:
            yield rejection, mask


def not_the_requester(query: Question, fleet: Fleet) -> Mask | None:
    return _all_but((query.request.requester,), fleet)


def pinned(query: Question, fleet: Fleet) -> Mask | None:
    wanted = query.request.constraints.pinned
    if wanted is None:
        return None
    mask = np.zeros(len(fleet), np.bool_)
    row = fleet.find(wanted)
    if row is not None:
        mask[row] = True
    return mask


def not_excluded(query: Question, fleet: Fleet) -> Mask | None:
    return _all_but(query.request.constraints.excluded, fleet)


def not_left(query: Question, fleet: Fleet) -> Mask | None:
    return _all_but(query.left, fleet)


def allowed(query: Question, fleet: Fleet) -> Mask | None:
    admission = _admission(query, fleet)
    return None if admission is None else admission.allowed


def not_denied(query: Question, fleet: Fleet) -> Mask | None:
    admission = _admission(query, fleet)
    return None if admission is None else admission.not_denied


def fresh(query: Question, fleet: Fleet) -> Mask:
    return fleet.valid_until > micros(query.now)


def not_cordoned(query: Question, fleet: Fleet) -> Mask | None:  # noqa: ARG001 - signature of all filters
    return fleet.open


def within_hours(query: Question, fleet: Fleet) -> Mask | None:
    return fleet.within_hours(micros(query.now))


def labelled(query: Question, fleet: Fleet) -> Mask | None:
    wanted = query.request.constraints.labels
    if not wanted:
        return None
    return _all_of([fleet.with_label(key, value) for key, value in wanted.items()])


def same_currency(query: Question, fleet: Fleet) -> Mask | None:
    """Applies to a maximum price and to a budget. A cluster without prices passes."""
    needed = []
    if query.request.constraints.max_price is not None:
        needed.append(in_its_currency(query.request, fleet))
    if query.purse is not None:
        needed.append(fleet.currency == currency_code(query.purse.currency))
    return _all_of(needed) | (fleet.currency == UNPRICED) if needed else None


def affordable(query: Question, fleet: Fleet) -> Mask | None:
    """A price in another currency passes: `same_currency` rejects it."""
    request, maximum = query.request, query.request.constraints.max_price
    if maximum is None:
        return None
    return (hourly(request, fleet) <= prices.limit(maximum)) | ~in_its_currency(request, fleet)


def within_budget(query: Question, fleet: Fleet) -> Mask | None:
    """Exact to the billionth: floats decide unless the price is close to the limit, then integers do."""
    if query.purse is None:
        return None
    wanted, most = query.request.resources, query.purse.most
    asked = hourly(query.request, fleet) * prices.BILLIONTHS
    limit = most + 0.5  # the agreed cost is rounded
    fits: Mask = asked < limit * (1 - _DOUBT)
    for row in np.flatnonzero(~fits & (asked <= limit * (1 + _DOUBT))):
        known = fleet.prices[row]
        fits[row] = known is None or known.agreed(wanted) <= most
    fits |= fleet.currency != currency_code(query.purse.currency)
    return fits


def enough(name: str, query: Question, fleet: Fleet) -> Mask | None:
    """Whether the amount is available regardless of policies."""
    wanted = query.request.resources.amount(name)
    if not wanted:
        return None
    available = fleet.available(name)
    return np.zeros(len(fleet), np.bool_) if available is None else available >= wanted


def enough_extended(query: Question, fleet: Fleet) -> Mask | None:
    wanted = query.request.resources.extended
    if not wanted:
        return None
    masks = [enough(name, query, fleet) for name in wanted]
    return _all_of([mask for mask in masks if mask is not None])


def not_kept_back(query: Question, fleet: Fleet) -> Mask | None:
    def left(name: str, there: Ints) -> Ints | None:
        bound = fleet.bound(name)
        return None if bound is None else there - bound.kept_back[: len(fleet)]

    return _not_withheld(query, fleet, left)


def under_cap(query: Question, fleet: Fleet) -> Mask | None:
    def left(name: str, _: Ints) -> Ints | None:
        bound = fleet.bound(name)
        return None if bound is None else bound.cap_left[: len(fleet)]

    return _not_withheld(query, fleet, left)


def within_share(query: Question, fleet: Fleet) -> Mask | None:
    def left(name: str, _: Ints) -> Ints | None:
        return fleet.share_left(name, query.request.requester)

    return _not_withheld(query, fleet, left)


def not_held(query: Question, fleet: Fleet) -> Mask | None:
    if not fleet.earmarks:
        return None
    return fleet.open_to(query.request.priority, query.ticket)


FILTERS: tuple[tuple[Refusal, Filter], ...] = (
    (Refusal.IS_REQUESTER, not_the_requester),
    (Refusal.NOT_PINNED, pinned),
    (Refusal.EXCLUDED, not_excluded),
    (Refusal.LEFT_BEFORE, not_left),
    (Refusal.REQUESTER_NOT_ALLOWED, allowed),
    (Refusal.REQUESTER_DENIED, not_denied),
    (Refusal.STALE, fresh),
    (Refusal.CORDONED, not_cordoned),
    (Refusal.OUTSIDE_OPENING_HOURS, within_hours),
    (Refusal.LABEL_MISMATCH, labelled),
    (Refusal.CURRENCY_MISMATCH, same_currency),
    (Refusal.TOO_EXPENSIVE, affordable),
    (Refusal.OVER_BUDGET, within_budget),
    *((rejection, partial(enough, name)) for name, rejection in INSUFFICIENT.items()),
    (Refusal.INSUFFICIENT_EXTENDED, enough_extended),
    (Refusal.KEPT_BACK, not_kept_back),
    (Refusal.LENDING_CAP_REACHED, under_cap),
    (Refusal.REQUESTER_CAP_REACHED, within_share),
    (Refusal.HELD_FOR_WAITER, not_held),
)

_SELDOM = (not_left, not_held)
_RARE = (*_SELDOM, pinned, not_excluded, labelled, same_currency, affordable, within_budget)
"""Filters that `feasible_clusters` evaluates for requests without and with constraints or a budget.
"""

_DOUBT = 1e-12
"""Relative tolerance below which floats do not decide about a price."""


def hourly(request: Request, fleet: Fleet | Selection) -> Floats:
    """Hourly cost of the request on each cluster, in its own currency; zero without prices."""
    amounts = request.resources
    cpu, memory, gpu, storage = fleet.rates
    costs: Floats = amounts.cpu * cpu + amounts.memory * memory
    costs += amounts.gpu * gpu
    costs += amounts.storage * storage
    return costs


def in_its_currency(request: Request, fleet: Fleet) -> Mask:
    """Clusters with prices in the currency of the request's maximum price."""
    currency = request.constraints.currency or prices.DEFAULT_CURRENCY
    same: Mask = fleet.currency == currency_code(currency)
    return same


def _bind(feasible: Mask, query: Question, fleet: Fleet, bounds: Bounds) -> None:
    """Removes clusters whose policy rejects the requester. Withheld amounts are already out of the
    free column.
    """
    request = query.request
    if bounds.access:
        feasible &= bounds.admission(request.requester, len(fleet)).admitted
    if bounds.shares:
        for name, wanted in request.resources.items():
            left = fleet.share_left(name, request.requester)
            feasible &= left is None or left >= wanted


def _admission(query: Question, fleet: Fleet) -> Admission | None:
    if fleet.bounds is None or not fleet.bounds.access:
        return None
    return fleet.bounds.admission(query.request.requester, len(fleet))


def _not_withheld(
    query: Question, fleet: Fleet, left_of: Callable[[str, Ints], Ints | None]
) -> Mask | None:
    """Clusters where the policy leaves enough. A resource that is not available at all is not withheld."""
    if fleet.bounds is None:
        return None
    mask = np.ones(len(fleet), np.bool_)
    for name, wanted in query.request.resources.items():
        there = fleet.available(name)
        left = None if there is None else left_of(name, there)
        if there is not None and left is not None:
            mask &= (left >= wanted) | (there < wanted)
    return mask


def _all_of(masks: list[Mask]) -> Mask:
    together: Mask = np.logical_and.reduce(masks)
    return together


def _all_but(clusters: Iterable[ClusterId], fleet: Fleet) -> Mask | None:
    rows = [row for cluster in clusters if (row := fleet.find(cluster)) is not None]
    if not rows:
        return None
    mask = np.ones(len(fleet), np.bool_)
    mask[rows] = False
    return mask
