"""The smallest change to a request that would make it fit a cluster, and how far it is from fitting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from kubelend.core import filters, prices, resources
from kubelend.core.columns import Floats, Ints, Mask
from kubelend.core.filters import Purse, Question
from kubelend.core.fleet import UNPRICED, Fleet, currency_code
from kubelend.core.models import ClusterId
from kubelend.core.refusals import INSUFFICIENT, Refusal
from kubelend.core.resources import NOTHING, Resources
from kubelend.core.selections import Selection


class Remedy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The smallest change to the request that would make it fit a cluster."""

    cluster: ClusterId
    text: str
    less: Resources = NOTHING
    max_price: int | None = None
    currency: str = ""
    """Of `max_price`: the cluster's own, which may be another than the request's."""
    drop_labels: dict[str, str] = {}


Verdicts = Sequence[tuple[Refusal, Mask]]

_AMOUNTS = {
    *INSUFFICIENT.values(),
    Refusal.INSUFFICIENT_EXTENDED,
    Refusal.KEPT_BACK,
    Refusal.LENDING_CAP_REACHED,
    Refusal.REQUESTER_CAP_REACHED,
}
"""Refusals that less of the request would avoid."""
_HELPLESS = {
    Refusal.IS_REQUESTER,
    Refusal.REFUSED_BEFORE,
    Refusal.REQUESTER_NOT_ALLOWED,
    Refusal.REQUESTER_DENIED,
    Refusal.STALE,
    Refusal.CORDONED,
}
"""Refusals that no other request of the same cluster would avoid."""
_PRICE = {Refusal.CURRENCY_MISMATCH, Refusal.TOO_EXPENSIVE}


def distance(question: Question, fleet: Fleet, verdicts: Verdicts) -> Floats:
    """How far each cluster is from fitting: missing shares, a whole step per other refusal."""
    distance = np.zeros(len(fleet), np.float64)
    for refusal, mask in verdicts:
        if refusal in _HELPLESS:
            distance[~mask] = np.inf
        elif refusal not in _AMOUNTS:
            distance[~mask] += 1
    for name, wanted in question.request.resources.items():
        left = _left(question, fleet, name)
        missing = wanted - (0 if left is None else left)
        distance += np.clip(missing, 0, None) / wanted
    distance[_has_nothing(question, fleet)] = np.inf
    if question.purse is not None:
        distance[_is_foreign(question.purse, fleet)] = np.inf
    return distance


def remedy(
    question: Question, fleet: Fleet, row: int, refusals: tuple[Refusal, ...]
) -> Remedy | None:
    """What would make a cluster fit that refuses; None if nothing would."""
    if not refusals or _HELPLESS.intersection(refusals):
        return None
    less = question.request.resources.shortfall(_amounts(_left, question, fleet, row))
    waits = bool(less) and _fits_empty(question, fleet, row)
    if less == question.request.resources:
        if not waits:
            return None
        less = NOTHING
    limits = _limit_steps(question, fleet, row, refusals)
    if limits is None:
        return None
    price = _price_needed(question, fleet, row, refusals)
    labels = _labels_missing(question, fleet, row)
    steps = [_STEPS[refusal] for refusal in refusals if refusal in _STEPS]
    steps += [*limits, *_amount_steps(less, waits)]
    if price is not None:
        steps.append(f"allow {prices.text(price)} {currency(fleet, row)} per hour")
    steps += [f"drop the label {key}={value}" for key, value in labels.items()]
    text = f"{fleet.ids[row]} fits if you {' and '.join(steps)}"
    in_currency = "" if price is None else currency(fleet, row)
    return Remedy(fleet.ids[row], text, less, price, in_currency, labels)


def currency(fleet: Fleet, row: int) -> str:
    """In what a cluster asks its prices; empty if it asks none."""
    code = int(fleet.currency[row])
    return "" if code == UNPRICED else code.to_bytes(8).lstrip(b"\0").decode("ascii")


_STEPS = {
    Refusal.NOT_PINNED: "do not pin another cluster",
    Refusal.EXCLUDED: "do not exclude it",
    Refusal.HELD_FOR_WAITER: "wait, or ask with a higher priority",
}


def _limit_steps(
    question: Question, fleet: Fleet, row: int, refusals: tuple[Refusal, ...]
) -> list[str] | None:
    """What to do about opening hours and the budget; None if nothing can be done."""
    steps, purse = [], question.purse
    if Refusal.OUTSIDE_OPENING_HOURS in refusals and fleet.bounds is not None:
        opens = fleet.bounds.openings.next_opening(row, question.now)
        if opens is None:
            return None
        steps.append(f"wait until it opens at {opens:%Y-%m-%dT%H:%MZ}")
    if purse is not None and _is_foreign(purse, fleet)[row]:
        return None
    if purse is not None and Refusal.OVER_BUDGET in refusals:
        left = f"{prices.text(purse.most)} {purse.currency}"
        steps.append(f"ask for less, or for less time (your budget leaves {left} per hour)")
    return steps


def _is_foreign(purse: Purse, fleet: Fleet) -> Mask:
    """The clusters that want to be paid in a currency of which the budget has none."""
    code = currency_code(purse.currency)
    foreign: Mask = (fleet.currency != code) & (fleet.currency != UNPRICED)
    return foreign


def _has_nothing(question: Question, fleet: Fleet) -> Mask:
    """Where no part is free and no waiting helps: less of the request would be nothing at all."""
    nothing, never = np.ones(len(fleet), np.bool_), np.zeros(len(fleet), np.bool_)
    for name, wanted in question.request.resources.items():
        left, most = _left(question, fleet, name), _most(question, fleet, name)
        nothing &= left is None or left == 0
        never |= most is None or most < wanted
    return nothing & never


def _fits_empty(question: Question, fleet: Fleet, row: int) -> bool:
    return question.request.resources.fits_in(_amounts(_most, question, fleet, row))


Column = Callable[[Question, Fleet, str], Ints | None]


def _left(question: Question, fleet: Fleet, name: str) -> Ints | None:
    """What each cluster would lend to this requester now; None if no cluster offers it."""
    free, share = fleet.free(name), fleet.share_left(name, question.request.requester)
    return free if free is None or share is None else np.minimum(free, np.maximum(share, 0))


def _most(_: Question, fleet: Fleet, name: str) -> Ints | None:
    """The same if nothing were reserved."""
    ceiling, bound = fleet.ceiling(name), fleet.bound(name)
    if ceiling is None or bound is None:
        return ceiling
    return np.minimum(ceiling, bound.share[: len(fleet)])


def _amounts(column: Column, question: Question, fleet: Fleet, row: int) -> Resources:
    amounts = {}
    for name, _ in question.request.resources.items():  # noqa: PERF102 - not a dict: it has no keys()
        values = column(question, fleet, name)
        amounts[name] = 0 if values is None else int(values[row])
    return Resources.of(amounts)


def _amount_steps(less: Resources, waits: bool) -> Iterator[str]:
    wait = "wait until reservations there end"
    if less:
        amounts = " and ".join(f"{resources.text(*part)} {part[0]}" for part in less.items())
        yield f"ask for {amounts} less, or {wait}" if waits else f"ask for {amounts} less"
    elif waits:
        yield wait


def _price_needed(
    question: Question, fleet: Fleet, row: int, refusals: tuple[Refusal, ...]
) -> int | None:
    """The smallest maximum that lets this cluster pass; None if it is not the maximum that refuses."""
    if question.request.constraints.max_price is None or _PRICE.isdisjoint(refusals):
        return None
    only = Selection(fleet, np.array([row]))
    hourly = float(filters.hourly(question.request, only)[0])
    rounded_down = int(hourly * prices.BILLIONTHS)
    return rounded_down if hourly <= prices.limit(rounded_down) else rounded_down + 1


def _labels_missing(question: Question, fleet: Fleet, row: int) -> dict[str, str]:
    has = fleet.labels[row]
    wanted = question.request.constraints.labels
    return {key: value for key, value in wanted.items() if has.get(key) != value}
