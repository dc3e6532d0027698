"""Requests that wait for capacity: who is served when some appears, and what is kept for whom.

Waiters are served by priority, then by age. A request that fits nowhere yet earmarks the cluster it is
nearest to fitting: whoever ranks behind it is not placed there, so the capacity that comes free adds
up for it instead of being taken away in small pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import numpy as np

from kubelend.core import decision, filters
from kubelend.core.events import Earmarked, Event, Placed
from kubelend.core.filters import Question
from kubelend.core.fleet import Fleet
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Reason
from kubelend.core.models import ClusterId, Reservation
from kubelend.core.refusals import INSUFFICIENT, Refusal

_CURED_BY_WAITING = {*INSUFFICIENT.values(), Refusal.INSUFFICIENT_EXTENDED}


def question_of(reservation: Reservation, now: datetime) -> Question:
    """Where can this reservation go, with its place in the queue and without where it has been?"""
    left = (
        reservation.left if reservation.target is None else (*reservation.left, reservation.target)
    )
    return Question(reservation.request, now, reservation.ticket, left)


def serve(ledger: Ledger, now: datetime) -> Iterator[Event]:
    """Place whoever fits since capacity came free; apply each event before asking for the next."""
    while ledger.freed and ledger.waiting_count:
        freed = set(ledger.freed)
        ledger.freed.clear()
        for waiter in ledger.waiting():
            yield from _serve_one(ledger, waiter, freed, now)
    ledger.freed.clear()


def earmark(ledger: Ledger, waiter: Reservation, now: datetime) -> Iterator[Event]:
    """Keep the nearest cluster for a waiter; a waiter behind it that had it looks for another."""
    cluster = _nearest(question_of(waiter, now), ledger.fleet)
    if cluster == waiter.earmark:
        return
    displaced = _holder(ledger, cluster)
    if displaced is not None:
        yield Earmarked(now, displaced.id, None)
    yield Earmarked(now, waiter.id, cluster)
    if displaced is not None:
        yield from earmark(ledger, ledger.reservation(displaced.id), now)


def _serve_one(
    ledger: Ledger, waiter: Reservation, freed: set[ClusterId], now: datetime
) -> Iterator[Event]:
    if any(_has_room(ledger, waiter, cluster) for cluster in freed):
        answer = decision.decide(question_of(waiter, now), ledger.fleet)
        if isinstance(answer, decision.Placement):
            expires_at = now + waiter.request.duration
            yield Placed(now, waiter.id, answer.cluster, expires_at, Reason.LOCKED)
            return
    if not _is_kept(ledger, waiter, now):
        yield from earmark(ledger, waiter, now)


def _has_room(ledger: Ledger, waiter: Reservation, cluster: ClusterId) -> bool:
    """A cheap look before a whole decision: most of what comes free fits no waiter."""
    if cluster not in ledger.clusters:
        return False
    return waiter.request.resources.fits_in(ledger.available(cluster))


def _is_kept(ledger: Ledger, waiter: Reservation, now: datetime) -> bool:
    """Whether the earmarked cluster can still become the one that serves this waiter."""
    cluster = None if waiter.earmark is None else ledger.clusters.get(waiter.earmark)
    if cluster is None or cluster.is_stale(now) or cluster.cordon is not None:
        return False
    return waiter.request.resources.fits_in(cluster.ceiling)


def _nearest(question: Question, fleet: Fleet) -> ClusterId | None:
    """The cluster with the smallest missing share, of those that would fit it when empty."""
    possible = np.ones(len(fleet), np.bool_)
    for refusal, mask in filters.verdicts(question, fleet):
        if refusal not in _CURED_BY_WAITING:
            possible &= mask
    missing = np.zeros(len(fleet), np.float64)
    for name, wanted in question.request.resources.items():
        free, ceiling = fleet.free(name), fleet.ceiling(name)
        if free is None or ceiling is None:
            return None
        possible &= ceiling >= wanted
        missing += np.clip(wanted - free, 0, None) / wanted
    if not possible.any():
        return None
    return fleet.ids[int(np.where(possible, missing, np.inf).argmin())]


def _holder(ledger: Ledger, cluster: ClusterId | None) -> Reservation | None:
    if cluster is None:
        return None
    return next((waiter for waiter in ledger.waiting() if waiter.earmark == cluster), None)
