"""The smallest change to a request that would make it fit a cluster, in words and for machines.

What is small is said in `nearness`. That doing what a remedy says helps is a matter of the filters, so they
are asked.
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
    """Of `max_price`: the cluster's own, which may be another than the request's."""
    drop_labels: dict[str, str] = {}


def remedy(
    question: Question, fleet: Fleet, row: int, refusals: tuple[Refusal, ...], near: Nearness
) -> Remedy | None:
    """What would make a cluster fit that refuses; None if nothing would."""
    way = _way(question, fleet, row, near) if refusals else None
    opening = _opening_steps(question, fleet, row, refusals)
    if way is None or opening is None:
        return None
    labels = _labels_missing(question, fleet, row)
    steps = [_STEPS[refusal] for refusal in refusals if refusal in _STEPS]
    steps += [*opening, *_budget_steps(question, way.bill), *_amount_steps(way)]
    price, in_currency = way.bill.price, ""
    if price is not None:
        in_currency = currency(fleet, row)
        steps.append(f"allow {prices.text(price)} {in_currency} per hour")
    steps += [f"drop the label {key}={value}" for key, value in labels.items()]
    text = f"{fleet.ids[row]} fits if you {' and '.join(steps)}"
    return Remedy(fleet.ids[row], text, way.less, price, in_currency, labels)


def currency(fleet: Fleet, row: int) -> str:
    """In what a cluster asks its prices; empty if it asks none."""
    code = int(fleet.currency[row])
    return "" if code == UNPRICED else code.to_bytes(8).lstrip(b"\0").decode("ascii")


_STEPS = {
    Refusal.NOT_PINNED: "do not pin another cluster",
    Refusal.EXCLUDED: "do not exclude it",
    Refusal.HELD_FOR_WAITER: "wait, or ask with a higher priority",
}


class _Bill(NamedTuple):
    """What is wrong with the price of some amounts."""

    price: int | None = None
    """The smallest maximum that lets it pass; None if it passes as it is."""
    is_over_budget: bool = False


class _Way(NamedTuple):
    """How to get the amounts: with less of them, by waiting for all, or by either."""

    less: Resources
    waits: bool
    bill: _Bill


def _way(question: Question, fleet: Fleet, row: int, near: Nearness) -> _Way | None:
    """The nearer way; or both, if they cost the same and one sentence can say both."""
    less, later = float(near.less[row]), float(near.later[row])
    if np.isinf(less) and np.isinf(later):
        return None
    missing = question.request.resources.shortfall(_left(question, fleet, row))
    reduced = _bill(question, fleet, row, missing)
    if np.isinf(later):
        return _Way(missing, False, reduced)
    in_full = _bill(question, fleet, row, NOTHING)
    if np.isinf(less) or (later < less and reduced != in_full):
        return _Way(NOTHING, True, in_full)
    return _Way(missing, reduced == in_full, reduced)


def _left(question: Question, fleet: Fleet, row: int) -> Resources:
    amounts = {}
    for name, _ in question.request.resources.items():  # noqa: PERF102 - not a dict: it has no keys()
        left = nearness.left(question, fleet, name)
        amounts[name] = 0 if left is None else int(left[row])
    return Resources.of(amounts)


def _bill(question: Question, fleet: Fleet, row: int, less: Resources) -> _Bill:
    """For the rest of the request, since less costs less."""
    if question.request.constraints.max_price is None and question.purse is None:
        return _Bill()
    rest = replace(question.request, resources=question.request.resources - less)
    asked = replace(question, request=rest)
    within = filters.within_budget(asked, fleet)
    return _Bill(_price_needed(asked, fleet, row), within is not None and not within[row])


def _price_needed(question: Question, fleet: Fleet, row: int) -> int | None:
    known, constraints = fleet.prices[row], question.request.constraints
    if known is None or constraints.max_price is None or _is_paid(question, fleet, row):
        return None
    rounded = known.agreed(question.request.resources)
    allowed = replace(constraints, max_price=rounded, currency=known.currency)
    request = replace(question.request, constraints=allowed)
    is_enough = _is_paid(replace(question, request=request), fleet, row)
    return rounded if is_enough else rounded + 1


def _is_paid(question: Question, fleet: Fleet, row: int) -> bool:
    masks = filters.same_currency(question, fleet), filters.affordable(question, fleet)
    return all(mask is None or mask[row] for mask in masks)


def _opening_steps(
    question: Question, fleet: Fleet, row: int, refusals: tuple[Refusal, ...]
) -> list[str] | None:
    """What to do about opening hours; None if it never opens."""
    if Refusal.OUTSIDE_OPENING_HOURS not in refusals or fleet.bounds is None:
        return []
    opens = fleet.bounds.openings.next_opening(row, question.now)
    return None if opens is None else [f"wait until it opens at {opens:%Y-%m-%dT%H:%MZ}"]


def _budget_steps(question: Question, bill: _Bill) -> Iterator[str]:
    if question.purse is not None and bill.is_over_budget:
        left = f"{prices.text(question.purse.most)} {question.purse.currency}"
        yield f"ask for less, or for less time (your budget leaves {left} per hour)"


def _amount_steps(way: _Way) -> Iterator[str]:
    wait = "wait until reservations there end"
    if way.less:
        amounts = " and ".join(f"{resources.text(*part)} {part[0]}" for part in way.less.items())
        yield f"ask for {amounts} less, or {wait}" if way.waits else f"ask for {amounts} less"
    elif way.waits:
        yield wait


def _labels_missing(question: Question, fleet: Fleet, row: int) -> dict[str, str]:
    has = fleet.labels[row]
    wanted = question.request.constraints.labels
    return {key: value for key, value in wanted.items() if has.get(key) != value}
