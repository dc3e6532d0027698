"""Which clusters can serve a request: one small function per reason to refuse.

A filter returns the mask of the clusters that pass, or None when it has nothing to say about this
request, which is the common case and costs nothing. `FILTERS` gives their order, which is the order
in which refusals are reported.
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
"""The ticket of a request that does not wait yet: every waiter of its priority ranks before it."""


class Purse(NamedTuple):
    """What a budget leaves for a request: so many billionths per hour, in this currency only."""

    most: int
    currency: str


class Question(msgspec.Struct, frozen=True):
    """Where can this go, now? `left` are clusters it must not return to."""

    request: Request
    now: datetime
    ticket: int = NEWEST
    left: tuple[ClusterId, ...] = ()
    purse: Purse | None = None


Filter = Callable[[Question, Fleet], Mask | None]


def passing(question: Question, fleet: Fleet) -> Mask:
    """The clusters that pass every filter: what `verdicts` says, folded together without detours."""
    request = question.request
    everyone = fleet.usable(micros(question.now))
    requester = fleet.find(request.requester)
    if requester is not None:
        everyone[requester] = False
    for name, wanted in request.resources.items():
        free = fleet.free(name)
        everyone &= False if free is None else free >= wanted
    if fleet.bounds is not None:
        _bind(everyone, question, fleet, fleet.bounds)
    is_plain = request.constraints is UNCONSTRAINED and question.purse is None
    for looks in _SELDOM if is_plain else _RARE:
        mask = looks(question, fleet)
        if mask is not None:
            everyone &= mask
    return everyone


def verdicts(question: Question, fleet: Fleet) -> Iterator[tuple[Refusal, Mask]]:
    """Each filter that applies, with the clusters it lets pass."""
    for refusal, looks in FILTERS:
        mask = looks(question, fleet)
        if mask is not None:
            yield refusal, mask


def not_the_requester(question: Question, fleet: Fleet) -> Mask | None:
    return _all_but((question.request.requester,), fleet)


def pinned(question: Question, fleet: Fleet) -> Mask | None:
    wanted = question.request.constraints.pinned
    if wanted is None:
        return None
    mask = np.zeros(len(fleet), np.bool_)
    row = fleet.find(wanted)
    if row is not None:
        mask[row] = True
    return mask


def not_excluded(question: Question, fleet: Fleet) -> Mask | None:
    return _all_but(question.request.constraints.excluded, fleet)


def not_left(question: Question, fleet: Fleet) -> Mask | None:
    return _all_but(question.left, fleet)


def allowed(question: Question, fleet: Fleet) -> Mask | None:
    admission = _admission(question, fleet)
    return None if admission is None else admission.allowed


def not_denied(question: Question, fleet: Fleet) -> Mask | None:
    admission = _admission(question, fleet)
    return None if admission is None else admission.not_denied


def fresh(question: Question, fleet: Fleet) -> Mask:
    return fleet.valid_until > micros(question.now)


def not_cordoned(question: Question, fleet: Fleet) -> Mask | None:  # noqa: ARG001 - every filter has this shape
    return fleet.open


def within_hours(question: Question, fleet: Fleet) -> Mask | None:
    return fleet.within_hours(micros(question.now))


def labelled(question: Question, fleet: Fleet) -> Mask | None:
    wanted = question.request.constraints.labels
    if not wanted:
        return None
    return _all_of([fleet.with_label(key, value) for key, value in wanted.items()])


def same_currency(question: Question, fleet: Fleet) -> Mask | None:
    """Only a maximum price and a budget need one. A cluster without a price asks for none."""
    needed = []
    if question.request.constraints.max_price is not None:
        needed.append(in_its_currency(question.request, fleet))
    if question.purse is not None:
        needed.append(fleet.currency == currency_code(question.purse.currency))
    return _all_of(needed) | (fleet.currency == UNPRICED) if needed else None


def affordable(question: Question, fleet: Fleet) -> Mask | None:
    """A price in another currency is neither above the maximum nor below: `same_currency` says so."""
    request, maximum = question.request, question.request.constraints.max_price
    if maximum is None:
        return None
    return (hourly(request, fleet) <= prices.limit(maximum)) | ~in_its_currency(request, fleet)


def within_budget(question: Question, fleet: Fleet) -> Mask | None:
    """Exact to the billionth: floats decide where they can, and whole numbers where it is close."""
    if question.purse is None:
        return None
    wanted, most = question.request.resources, question.purse.most
    asked = hourly(question.request, fleet) * prices.BILLIONTHS
    limit = most + 0.5  # what is agreed is rounded
    fits: Mask = asked < limit * (1 - _DOUBT)
    for row in np.flatnonzero(~fits & (asked <= limit * (1 + _DOUBT))):
        known = fleet.prices[row]
        fits[row] = known is None or known.agreed(wanted) <= most
    fits |= fleet.currency != currency_code(question.purse.currency)
    return fits


def enough(name: str, question: Question, fleet: Fleet) -> Mask | None:
    """Whether it is there at all, whatever a policy withholds."""
    wanted = question.request.resources.amount(name)
    if not wanted:
        return None
    available = fleet.available(name)
    return np.zeros(len(fleet), np.bool_) if available is None else available >= wanted


def enough_extended(question: Question, fleet: Fleet) -> Mask | None:
    wanted = question.request.resources.extended
    if not wanted:
        return None
    masks = [enough(name, question, fleet) for name in wanted]
    return _all_of([mask for mask in masks if mask is not None])


def not_kept_back(question: Question, fleet: Fleet) -> Mask | None:
    def left(name: str, there: Ints) -> Ints | None:
        bound = fleet.bound(name)
        return None if bound is None else there - bound.kept_back[: len(fleet)]

    return _not_withheld(question, fleet, left)


def under_cap(question: Question, fleet: Fleet) -> Mask | None:
    def left(name: str, _: Ints) -> Ints | None:
        bound = fleet.bound(name)
        return None if bound is None else bound.cap_left[: len(fleet)]

    return _not_withheld(question, fleet, left)


def within_share(question: Question, fleet: Fleet) -> Mask | None:
    def left(name: str, _: Ints) -> Ints | None:
        return fleet.share_left(name, question.request.requester)

    return _not_withheld(question, fleet, left)


def not_held(question: Question, fleet: Fleet) -> Mask | None:
    if not fleet.earmarks:
        return None
    return fleet.open_to(question.request.priority, question.ticket)


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
    *((refusal, partial(enough, name)) for name, refusal in INSUFFICIENT.items()),
    (Refusal.INSUFFICIENT_EXTENDED, enough_extended),
    (Refusal.KEPT_BACK, not_kept_back),
    (Refusal.LENDING_CAP_REACHED, under_cap),
    (Refusal.REQUESTER_CAP_REACHED, within_share),
    (Refusal.HELD_FOR_WAITER, not_held),
)

_SELDOM = (not_left, not_held)
_RARE = (*_SELDOM, pinned, not_excluded, labelled, same_currency, affordable, within_budget)
"""What applies to few requests, and among them to those without constraints and budgets."""

_DOUBT = 1e-12
"""Floating point is trusted with a price that differs by more than this part of it."""


def hourly(request: Request, fleet: Fleet | Selection) -> Floats:
    """What each cluster asks per hour for this request, in its own currency; zero without a price."""
    amounts = request.resources
    cpu, memory, gpu, storage = fleet.rates
    costs: Floats = amounts.cpu * cpu + amounts.memory * memory
    costs += amounts.gpu * gpu
    costs += amounts.storage * storage
    return costs


def in_its_currency(request: Request, fleet: Fleet) -> Mask:
    """The clusters whose prices can be compared with the maximum of the request."""
    currency = request.constraints.currency or prices.DEFAULT_CURRENCY
    same: Mask = fleet.currency == currency_code(currency)
    return same


def _bind(everyone: Mask, question: Question, fleet: Fleet, bounds: Bounds) -> None:
    """Leave out who does not lend to this requester, or not so much; what is free is so by itself."""
    request = question.request
    if bounds.access:
        everyone &= bounds.admission(request.requester, len(fleet)).admitted
    if bounds.shares:
        for name, wanted in request.resources.items():
            left = fleet.share_left(name, request.requester)
            everyone &= left is None or left >= wanted


def _admission(question: Question, fleet: Fleet) -> Admission | None:
    if fleet.bounds is None or not fleet.bounds.access:
        return None
    return fleet.bounds.admission(question.request.requester, len(fleet))


def _not_withheld(
    question: Question, fleet: Fleet, room: Callable[[str, Ints], Ints | None]
) -> Mask | None:
    """Where policies leave room. What is not there at all is missing, and not withheld."""
    if fleet.bounds is None:
        return None
    mask = np.ones(len(fleet), np.bool_)
    for name, wanted in question.request.resources.items():
        there = fleet.available(name)
        left = None if there is None else room(name, there)
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
