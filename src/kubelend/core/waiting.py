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
from kubelend.core.fleet import Fleet, Mask
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
    """Place whoever fits since capacity came free; apply each event before asking for the next.

    Only what came free is looked at: whatever else is there has been refused to every waiter before.
    """
    while ledger.freed and ledger.waiting_count:
        freed = ledger.freed & ledger.clusters.keys()
        ledger.freed.clear()
        for waiter in ledger.waiting():
            yield from _serve_one(ledger, ledger.reservation(waiter.id), freed, now)
            freed -= {ledger.reservation(waiter.id).earmark}  # nobody behind it may have that one
            if not freed:
                break
    ledger.freed.clear()


def earmark(ledger: Ledger, waiter: Reservation, now: datetime) -> Iterator[Event]:
    """Keep the nearest cluster for a waiter; a waiter behind it that had it looks for another."""
    seeker: Reservation | None = waiter
    while seeker is not None:
        cluster = _nearest(question_of(seeker, now), ledger.fleet)
        if cluster == seeker.earmark:
            return
        displaced = None if cluster is None else ledger.earmarked(cluster)
        yield Earmarked(now, seeker.id, cluster)
        seeker = displaced


def _serve_one(
    ledger: Ledger, waiter: Reservation, freed: set[ClusterId], now: datetime
) -> Iterator[Event]:
    wanted = waiter.request.resources
    usable = [cluster for cluster in freed if wanted.fits_in(ledger.cluster(cluster).ceiling)]
    if any(wanted.fits_in(ledger.available(cluster)) for cluster in usable):
        answer = decision.decide(question_of(waiter, now), ledger.fleet)
        if isinstance(answer, decision.Placement):
            expires_at = now + waiter.request.duration
            yield Placed(now, waiter.id, answer.cluster, expires_at, Reason.LOCKED)
            return
    if not _is_kept(ledger, waiter, freed, now) and (usable or waiter.earmark is not None):
        yield from earmark(ledger, waiter, now)


def _is_kept(ledger: Ledger, waiter: Reservation, freed: set[ClusterId], now: datetime) -> bool:
    """Whether the earmarked cluster can still become the one that serves this waiter."""
    cluster = None if waiter.earmark is None else ledger.clusters.get(waiter.earmark)
    if cluster is None or cluster.is_stale(now):
        return False
    if cluster.id not in freed:
        return True  # but for its age, it is as it was when it was chosen
    row = ledger.fleet.find(cluster.id)
    return row is not None and bool(_possible(question_of(waiter, now), ledger.fleet)[row])


def _nearest(question: Question, fleet: Fleet) -> ClusterId | None:
    """The cluster with the smallest missing share, of those that could serve it in time."""
    possible = _possible(question, fleet)
    if not possible.any():
        return None
    missing = np.zeros(len(fleet), np.float64)
    for name, wanted in question.request.resources.items():
        free = fleet.free(name)
        missing += 1 if free is None else np.clip(wanted - free, 0, None) / wanted
    return fleet.ids[int(np.where(possible, missing, np.inf).argmin())]


def _possible(question: Question, fleet: Fleet) -> Mask:
    """The clusters that would serve it if they lent nothing to anybody else."""
    possible = np.ones(len(fleet), np.bool_)
    for refusal, mask in filters.verdicts(question, fleet):
        if refusal not in _CURED_BY_WAITING:
            possible &= mask
    for name, wanted in question.request.resources.items():
        ceiling = fleet.ceiling(name)
        possible &= ceiling is not None and ceiling >= wanted
    return possible
