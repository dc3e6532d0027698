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
from kubelend.core.columns import (
    INT64_MAX,
    Floats,
    Ints,
    LimitColumn,
    Mask,
    PolicyColumns,
    RequesterMask,
)
from kubelend.core.durations import to_micros
from kubelend.core.fleet import UNPRICED, Fleet, FleetSubset, currency_code
from kubelend.core.lifecycle import INSUFFICIENT_BY_RESOURCE, Rejection
from kubelend.core.models import UNCONSTRAINED, ClusterId, Request

NEW_REQUEST_TICKET = INT64_MAX
"""The ticket of a request that is not queued: waiting ones of the same priority rank above it."""


class BudgetLimit(NamedTuple):
    """The highest hourly price that a budget allows, in billionths of one currency."""

    max_hourly_price: int
    currency: str


class PlacementQuery(msgspec.Struct, frozen=True):
    """A request to be placed, with its rank and its previous providers, which are never tried again."""

    request: Request
    now: datetime
    ticket: int = NEW_REQUEST_TICKET
    excluded_before: tuple[ClusterId, ...] = ()
    budget: BudgetLimit | None = None


Filter = Callable[[PlacementQuery, Fleet], Mask | None]


def feasible_clusters(query: PlacementQuery, fleet: Fleet) -> Mask:
    """Clusters that pass every filter: the fast path of `filter_masks`."""
    request = query.request
    feasible = fleet.usable(to_micros(query.now))
    requester = fleet.find_row(request.requester)
    if requester is not None:
        feasible[requester] = False
    for name, wanted in request.resources.items():
        free = fleet.free(name)
        feasible &= False if free is None else free >= wanted
    if fleet.policy_columns is not None:
        _apply_policies(feasible, query, fleet, fleet.policy_columns)
    is_plain = request.constraints is UNCONSTRAINED and query.budget is None
    for passes in _FILTERS_OF_PLAIN_REQUESTS if is_plain else _FILTERS_OF_CONSTRAINED_REQUESTS:
        mask = passes(query, fleet)
        if mask is not None:
            feasible &= mask
    return feasible


def filter_masks(query: PlacementQuery, fleet: Fleet) -> Iterator[tuple[Rejection, Mask]]:
    """The mask of each filter that applies, with its rejection reason."""
    for rejection, passes in FILTERS:
        mask = passes(query, fleet)
        if mask is not None:
            yield rejection, mask


def not_the_requester(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    return _all_but((query.request.requester,), fleet)


def matches_pin(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    wanted = query.request.constraints.pinned
    if wanted is None:
        return None
    mask = np.zeros(len(fleet), np.bool_)
    row = fleet.find_row(wanted)
    if row is not None:
        mask[row] = True
    return mask


def not_excluded(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    return _all_but(query.request.constraints.excluded, fleet)


def not_tried_before(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    return _all_but(query.excluded_before, fleet)


def requester_allowed(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    admission = _requester_mask(query, fleet)
    return None if admission is None else admission.allowed


def requester_not_denied(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    admission = _requester_mask(query, fleet)
    return None if admission is None else admission.not_denied


def not_stale(query: PlacementQuery, fleet: Fleet) -> Mask:
    return fleet.valid_until > to_micros(query.now)


def not_cordoned(query: PlacementQuery, fleet: Fleet) -> Mask | None:  # noqa: ARG001 - signature of all filters
    return fleet.uncordoned


def within_hours(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    return fleet.within_hours(to_micros(query.now))


def matches_labels(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    wanted = query.request.constraints.labels
    if not wanted:
        return None
    return _all_of([fleet.with_label(key, value) for key, value in wanted.items()])


def same_currency(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    """Applies to a maximum price and to a budget. A cluster without prices passes."""
    needed = []
    if query.request.constraints.max_price is not None:
        needed.append(in_request_currency(query.request, fleet))
    if query.budget is not None:
        needed.append(fleet.currency == currency_code(query.budget.currency))
    return _all_of(needed) | (fleet.currency == UNPRICED) if needed else None


def within_max_price(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    """A price in another currency passes: `same_currency` rejects it."""
    request, maximum = query.request, query.request.constraints.max_price
    if maximum is None:
        return None
    return (hourly_costs(request, fleet) <= prices.max_price_limit(maximum)) | ~in_request_currency(
        request, fleet
    )


def within_budget(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    """Exact to the billionth: floats decide unless the price is close to the limit, then integers do."""
    if query.budget is None:
        return None
    wanted, most = query.request.resources, query.budget.max_hourly_price
    requested = hourly_costs(query.request, fleet) * prices.BILLIONTHS
    limit = most + 0.5  # the agreed cost is rounded
    fits: Mask = requested < limit * (1 - _FLOAT_TOLERANCE)
    for row in np.flatnonzero(~fits & (requested <= limit * (1 + _FLOAT_TOLERANCE))):
        known = fleet.prices[row]
        fits[row] = known is None or known.hourly_cost(wanted) <= most
    fits |= fleet.currency != currency_code(query.budget.currency)
    return fits


def has_enough(name: str, query: PlacementQuery, fleet: Fleet) -> Mask | None:
    """Whether the amount is available regardless of policies."""
    wanted = query.request.resources.amount(name)
    if not wanted:
        return None
    available = fleet.available(name)
    return np.zeros(len(fleet), np.bool_) if available is None else available >= wanted


def has_enough_extended(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    wanted = query.request.resources.extended
    if not wanted:
        return None
    masks = [has_enough(name, query, fleet) for name in wanted]
    return _all_of([mask for mask in masks if mask is not None])


def not_kept_back(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    return _not_withheld(
        query, fleet, lambda there, bound, _: there - bound.kept_back[: len(there)]
    )


def within_lending_cap(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    return _not_withheld(query, fleet, lambda there, bound, _: bound.cap_left[: len(there)])


def within_requester_cap(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    return _not_withheld(query, fleet, lambda _, __, requester_cap_left: requester_cap_left)


def not_nominated_for_other(query: PlacementQuery, fleet: Fleet) -> Mask | None:
    if not fleet.nomination_count:
        return None
    return fleet.not_nominated_above(query.request.priority, query.ticket)


FILTERS: tuple[tuple[Rejection, Filter], ...] = (
    (Rejection.IS_REQUESTER, not_the_requester),
    (Rejection.NOT_PINNED, matches_pin),
    (Rejection.EXCLUDED, not_excluded),
    (Rejection.PREVIOUS_PROVIDER, not_tried_before),
    (Rejection.REQUESTER_NOT_ALLOWED, requester_allowed),
    (Rejection.REQUESTER_DENIED, requester_not_denied),
    (Rejection.STALE, not_stale),
    (Rejection.CORDONED, not_cordoned),
    (Rejection.OUTSIDE_OPENING_HOURS, within_hours),
    (Rejection.LABEL_MISMATCH, matches_labels),
    (Rejection.CURRENCY_MISMATCH, same_currency),
    (Rejection.TOO_EXPENSIVE, within_max_price),
    (Rejection.OVER_BUDGET, within_budget),
    *(
        (rejection, partial(has_enough, name))
        for name, rejection in INSUFFICIENT_BY_RESOURCE.items()
    ),
    (Rejection.INSUFFICIENT_EXTENDED, has_enough_extended),
    (Rejection.KEPT_BACK, not_kept_back),
    (Rejection.LENDING_CAP_REACHED, within_lending_cap),
    (Rejection.REQUESTER_CAP_REACHED, within_requester_cap),
    (Rejection.NOMINATED_FOR_OTHER, not_nominated_for_other),
)

_FILTERS_OF_PLAIN_REQUESTS = (not_tried_before, not_nominated_for_other)
_FILTERS_OF_CONSTRAINED_REQUESTS = (
    *_FILTERS_OF_PLAIN_REQUESTS,
    matches_pin,
    not_excluded,
    matches_labels,
    same_currency,
    within_max_price,
    within_budget,
)
"""What `feasible_clusters` evaluates for requests without and with constraints or a budget."""

_FLOAT_TOLERANCE = 1e-12
"""Relative tolerance below which floats do not decide about a price."""


def hourly_costs(request: Request, fleet: Fleet | FleetSubset) -> Floats:
    """Hourly cost of the request on each cluster, in its own currency; zero without prices."""
    amounts = request.resources
    cpu, memory, gpu, storage = fleet.rates
    costs: Floats = amounts.cpu * cpu + amounts.memory * memory
    costs += amounts.gpu * gpu
    costs += amounts.storage * storage
    return costs


def missing_shares(request: Request, fleet: Fleet) -> Floats:
    """The largest missing share of a requested amount on each cluster: 1 of 4 cores is 1/4."""
    missing = np.zeros(len(fleet), np.float64)
    for name, wanted in request.resources.items():
        has = fleet.lendable(name, request.requester)
        share = 1 if has is None else np.clip(wanted - has, 0, wanted) / wanted
        np.maximum(missing, share, out=missing)
    return missing


def in_request_currency(request: Request, fleet: Fleet) -> Mask:
    """Clusters with prices in the currency of the request's maximum price."""
    currency = request.constraints.currency or prices.DEFAULT_CURRENCY
    same: Mask = fleet.currency == currency_code(currency)
    return same


def _apply_policies(
    feasible: Mask, query: PlacementQuery, fleet: Fleet, bounds: PolicyColumns
) -> None:
    """Removes clusters whose policy rejects the requester. The free column is without withheld amounts."""
    request = query.request
    if bounds.access:
        feasible &= bounds.requester_mask(request.requester, len(fleet)).admitted
    if bounds.requester_cap_count:
        for name, wanted in request.resources.items():
            left = fleet.requester_cap_left(name, request.requester)
            feasible &= left is None or left >= wanted


def _requester_mask(query: PlacementQuery, fleet: Fleet) -> RequesterMask | None:
    if fleet.policy_columns is None or not fleet.policy_columns.access:
        return None
    return fleet.policy_columns.requester_mask(query.request.requester, len(fleet))


def _not_withheld(
    query: PlacementQuery, fleet: Fleet, left_of: Callable[[Ints, LimitColumn, Ints], Ints]
) -> Mask | None:
    """Clusters where the policy leaves enough. A resource that is not available at all is not withheld."""
    if fleet.policy_columns is None:
        return None
    mask = np.ones(len(fleet), np.bool_)
    for name, wanted in query.request.resources.items():
        there, bound = fleet.available(name), fleet.limit_column(name)
        cap_left = fleet.requester_cap_left(name, query.request.requester)
        if there is not None and bound is not None and cap_left is not None:
            mask &= (left_of(there, bound, cap_left) >= wanted) | (there < wanted)
    return mask


def _all_of(masks: list[Mask]) -> Mask:
    combined: Mask = np.logical_and.reduce(masks)
    return combined


def _all_but(clusters: Iterable[ClusterId], fleet: Fleet) -> Mask | None:
    rows = [row for cluster in clusters if (row := fleet.find_row(cluster)) is not None]
    if not rows:
        return None
    mask = np.ones(len(fleet), np.bool_)
    mask[rows] = False
    return mask
