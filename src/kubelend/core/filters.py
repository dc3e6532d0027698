"""Which clusters can serve a request: one small function per reason to refuse.

A filter returns the mask of the clusters that pass, or None when it has nothing to say about this
request, which is the common case and costs nothing. `FILTERS` gives their order, which is the order
in which refusals are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial

import msgspec
import numpy as np

from kubelend.core import prices
from kubelend.core.fleet import (
    UNPRICED,
    Fleet,
    Floats,
    Mask,
    Selection,
    currency_code,
    micros,
)
from kubelend.core.models import UNCONSTRAINED, ClusterId, Request
from kubelend.core.refusals import INSUFFICIENT, Refusal

NEWEST = int(np.iinfo(np.int64).max)
"""The ticket of a request that does not wait yet: every waiter of its priority ranks before it."""


class Question(msgspec.Struct, frozen=True):
    """Where can this go, now? `left` are clusters it must not return to."""

    request: Request
    now: datetime
    ticket: int = NEWEST
    left: tuple[ClusterId, ...] = ()


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
    for looks in _RARE if request.constraints is not UNCONSTRAINED else _SELDOM:
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


def fresh(question: Question, fleet: Fleet) -> Mask:
    return fleet.valid_until > micros(question.now)


def not_cordoned(question: Question, fleet: Fleet) -> Mask | None:  # noqa: ARG001 - every filter has this shape
    return fleet.open


def labelled(question: Question, fleet: Fleet) -> Mask | None:
    wanted = question.request.constraints.labels
    if not wanted:
        return None
    return _all_of([fleet.with_label(key, value) for key, value in wanted.items()])


def same_currency(question: Question, fleet: Fleet) -> Mask | None:
    """Only a maximum price needs one currency. A cluster without a price asks for none."""
    if question.request.constraints.max_price is None:
        return None
    comparable = in_currency(question.request, fleet)
    comparable |= fleet.currency == UNPRICED
    return comparable


def affordable(question: Question, fleet: Fleet) -> Mask | None:
    """A price in another currency is neither above the maximum nor below: `same_currency` says so."""
    request, maximum = question.request, question.request.constraints.max_price
    if maximum is None:
        return None
    return (hourly(request, fleet) <= prices.limit(maximum)) | ~in_currency(request, fleet)


def enough(name: str, question: Question, fleet: Fleet) -> Mask | None:
    wanted = question.request.resources.amount(name)
    if not wanted:
        return None
    free = fleet.free(name)
    return np.zeros(len(fleet), np.bool_) if free is None else free >= wanted


def enough_extended(question: Question, fleet: Fleet) -> Mask | None:
    wanted = question.request.resources.extended
    if not wanted:
        return None
    masks = [enough(name, question, fleet) for name in wanted]
    return _all_of([mask for mask in masks if mask is not None])


def not_held(question: Question, fleet: Fleet) -> Mask | None:
    if not fleet.earmarks:
        return None
    return fleet.open_to(question.request.priority, question.ticket)


FILTERS: tuple[tuple[Refusal, Filter], ...] = (
    (Refusal.IS_REQUESTER, not_the_requester),
    (Refusal.NOT_PINNED, pinned),
    (Refusal.EXCLUDED, not_excluded),
    (Refusal.REFUSED_BEFORE, not_left),
    (Refusal.STALE, fresh),
    (Refusal.CORDONED, not_cordoned),
    (Refusal.LABEL_MISMATCH, labelled),
    (Refusal.CURRENCY_MISMATCH, same_currency),
    (Refusal.TOO_EXPENSIVE, affordable),
    *((refusal, partial(enough, name)) for name, refusal in INSUFFICIENT.items()),
    (Refusal.INSUFFICIENT_EXTENDED, enough_extended),
    (Refusal.HELD_FOR_WAITER, not_held),
)

_SELDOM = (not_left, not_held)
_RARE = (*_SELDOM, pinned, not_excluded, labelled, same_currency, affordable)
"""What applies to few requests, and among them to those without constraints."""


def hourly(request: Request, fleet: Fleet | Selection) -> Floats:
    """What each cluster asks per hour for this request, in its own currency; zero without a price."""
    amounts = request.resources
    cpu, memory, gpu, storage = fleet.rates
    costs: Floats = amounts.cpu * cpu + amounts.memory * memory
    costs += amounts.gpu * gpu
    costs += amounts.storage * storage
    return costs


def in_currency(request: Request, fleet: Fleet | Selection) -> Mask:
    """The clusters whose prices can be compared with those of the request."""
    same: Mask = fleet.currency == currency_code(request.constraints.currency)
    return same


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
