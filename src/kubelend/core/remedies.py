"""Suggestions: the smallest change that would make a request fit a cluster, as text and as data.

The filters verify that a suggested change helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from kubelend.core import filters, nearness, prices, resources
from kubelend.core.filters import PlacementQuery
from kubelend.core.fleet import UNPRICED, Fleet
from kubelend.core.models import ClusterId
from kubelend.core.nearness import Distance
from kubelend.core.refusals import Rejection
from kubelend.core.resources import NOTHING, Resources


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
        left = nearness.lendable_now(query, fleet, name)
        amounts[name] = 0 if left is None else int(left[row])
    return Resources.of(amounts)


def _check_price(query: PlacementQuery, fleet: Fleet, row: int, less: Resources) -> _PriceCheck:
    """Checks the price of the reduced request."""
    if query.request.constraints.max_price is None and query.budget is None:
        return _PriceCheck()
    rest = replace(query.request, resources=query.request.resources - less)
    asked = replace(query, request=rest)
    within = filters.within_budget(asked, fleet)
    return _PriceCheck(_price_needed(asked, fleet, row), within is not None and not within[row])


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
