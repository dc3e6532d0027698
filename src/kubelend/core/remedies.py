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
from kubelend.core.filters import Question
from kubelend.core.fleet import UNPRICED, Fleet
from kubelend.core.models import ClusterId
from kubelend.core.nearness import Nearness
from kubelend.core.refusals import Refusal
from kubelend.core.resources import NOTHING, Resources


class Remedy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The smallest change to the request that would make it fit a cluster."""

    cluster: ClusterId
    text: str
    less: Resources = NOTHING
    max_price: int | None = None
    currency: str = ""
    """Currency of `max_price`: that of the cluster, which may differ from that of the request."""
    drop_labels: dict[str, str] = {}


def remedy(
    query: Question, fleet: Fleet, row: int, rejections: tuple[Refusal, ...], near: Nearness
) -> Remedy | None:
    """The change that would make a rejected cluster fit; None if there is none."""
    way = _way(query, fleet, row, near) if rejections else None
    opening = _opening_steps(query, fleet, row, rejections)
    if way is None or opening is None:
        return None
    labels = _labels_missing(query, fleet, row)
    steps = [_STEPS[rejection] for rejection in rejections if rejection in _STEPS]
    steps += [*opening, *_budget_steps(query, way.bill), *_amount_steps(way)]
    price, in_currency = way.bill.price, ""
    if price is not None:
        in_currency = currency(fleet, row)
        steps.append(f"allow {prices.text(price)} {in_currency} per hour")
    steps += [f"drop the label {key}={value}" for key, value in labels.items()]
    text = f"{fleet.ids[row]} fits if you {' and '.join(steps)}"
    return Remedy(fleet.ids[row], text, way.less, price, in_currency, labels)


def currency(fleet: Fleet, row: int) -> str:
    """Currency of a cluster's prices; empty if it has none."""
    code = int(fleet.currency[row])
    return "" if code == UNPRICED else code.to_bytes(8).lstrip(b"\0").decode("ascii")


_STEPS = {
    Refusal.NOT_PINNED: "remove the pin to another cluster",
    Refusal.EXCLUDED: "remove its exclusion",
    Refusal.HELD_FOR_WAITER: "wait, or use a higher priority",
}


class _Bill(NamedTuple):
    """Result of the price and budget checks."""

    price: int | None = None
    """The smallest maximum price that passes; None if the current one passes."""
    is_over_budget: bool = False


class _Way(NamedTuple):
    """How to obtain the amounts: by requesting less, by waiting, or by either."""

    less: Resources
    waits: bool
    bill: _Bill


def _way(query: Question, fleet: Fleet, row: int, near: Nearness) -> _Way | None:
    """The option with the smaller distance; or both, if the price is the same."""
    less, later = float(near.less[row]), float(near.later[row])
    if np.isinf(less) and np.isinf(later):
        return None
    missing = query.request.resources.shortfall(_left(query, fleet, row))
    reduced = _bill(query, fleet, row, missing)
    if np.isinf(later):
        return _Way(missing, False, reduced)
    in_full = _bill(query, fleet, row, NOTHING)
    if np.isinf(less) or (later < less and reduced != in_full):
        return _Way(NOTHING, True, in_full)
    return _Way(missing, reduced == in_full, reduced)


def _left(query: Question, fleet: Fleet, row: int) -> Resources:
    amounts = {}
    for name, _ in query.request.resources.items():  # noqa: PERF102 - not a dict: it has no keys()
        left = nearness.left(query, fleet, name)
        amounts[name] = 0 if left is None else int(left[row])
    return Resources.of(amounts)


def _bill(query: Question, fleet: Fleet, row: int, less: Resources) -> _Bill:
    """Checks the price of the reduced request."""
    if query.request.constraints.max_price is None and query.purse is None:
        return _Bill()
    rest = replace(query.request, resources=query.request.resources - less)
    asked = replace(query, request=rest)
    within = filters.within_budget(asked, fleet)
    return _Bill(_price_needed(asked, fleet, row), within is not None and not within[row])


def _price_needed(query: Question, fleet: Fleet, row: int) -> int | None:
    known, constraints = fleet.prices[row], query.request.constraints
    if known is None or constraints.max_price is None or _is_paid(query, fleet, row):
        return None
    rounded = known.agreed(query.request.resources)
    allowed = replace(constraints, max_price=rounded, currency=known.currency)
    request = replace(query.request, constraints=allowed)
    is_enough = _is_paid(replace(query, request=request), fleet, row)
    return rounded if is_enough else rounded + 1


def _is_paid(query: Question, fleet: Fleet, row: int) -> bool:
    masks = filters.same_currency(query, fleet), filters.affordable(query, fleet)
    return all(mask is None or mask[row] for mask in masks)


def _opening_steps(
    query: Question, fleet: Fleet, row: int, rejections: tuple[Refusal, ...]
) -> list[str] | None:
    """The step for opening hours; None if the cluster never opens."""
    if Refusal.OUTSIDE_OPENING_HOURS not in rejections or fleet.bounds is None:
        return []
    opens = fleet.bounds.openings.next_opening(row, query.now)
    return None if opens is None else [f"wait until it opens at {opens:%Y-%m-%dT%H:%MZ}"]


def _budget_steps(query: Question, bill: _Bill) -> Iterator[str]:
    if query.purse is not None and bill.is_over_budget:
        left = f"{prices.text(query.purse.most)} {query.purse.currency}"
        yield f"request less, or for a shorter time (your budget leaves {left} per hour)"


def _amount_steps(way: _Way) -> Iterator[str]:
    wait = "wait until reservations there end"
    if way.less:
        amounts = " and ".join(f"{resources.text(*part)} {part[0]}" for part in way.less.items())
        yield f"request {amounts} less, or {wait}" if way.waits else f"request {amounts} less"
    elif way.waits:
        yield wait


def _labels_missing(query: Question, fleet: Fleet, row: int) -> dict[str, str]:
    has = fleet.labels[row]
    wanted = query.request.constraints.labels
    return {key: value for key, value in wanted.items() if has.get(key) != value}
