"""Serves the wait queue and nominates clusters.

Waiting requests are served by priority, then by age. A request that fits nowhere yet gets the
nearest cluster nominated: requests that rank lower are not placed there, so that freed capacity
accumulates instead of going to smaller requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from datetime import datetime

import numpy as np

from kubelend.core import explanations, filters, quotas, transitions
from kubelend.core.columns import Mask
from kubelend.core.durations import to_micros
from kubelend.core.events import Event, Nominated
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import INSUFFICIENT_AMOUNT, Reason, Rejection
from kubelend.core.models import ClusterId, Reservation

_RESOLVED_BY_WAITING = INSUFFICIENT_AMOUNT - {Rejection.REQUESTER_CAP_REACHED}
"""A requester that reached its cap must not block a cluster for others."""


def serve_queue(ledger: Ledger, now: datetime) -> Iterator[Event]:
    """Places waiting requests on freed capacity. Apply each event before advancing the iterator.

    Only freed clusters are examined, because all others have already rejected every waiting
    request. For a requester with a changed quota usage all clusters are examined again.
    """
    while (ledger.capacity_freed or ledger.quota_changed) and ledger.waiting_count:
        freed, shifted = ledger.capacity_freed & ledger.clusters.keys(), set(ledger.quota_changed)
        ledger.capacity_freed.clear()
        ledger.quota_changed.clear()
        for waiter in ledger.waiting():
            if waiter.requester in shifted:
                yield from _retry_placement(ledger, ledger.reservation(waiter.id), now)
            elif freed:
                yield from _serve_waiter(ledger, ledger.reservation(waiter.id), freed, now)
            # A nominated cluster is not available to lower ranks.
            freed -= {ledger.reservation(waiter.id).nominated_cluster}
            if not freed and not shifted:
                break
    ledger.capacity_freed.clear()
    ledger.quota_changed.clear()


def nominate(ledger: Ledger, waiter: Reservation, now: datetime) -> Iterator[Event]:
    """Nominates the nearest cluster; a displaced request of lower rank is nominated again."""
    waiting: Reservation | None = waiter
    while waiting is not None:
        cluster = _nearest_cluster(ledger, waiting, now)
        if cluster == waiting.nominated_cluster:
            return
        displaced = None if cluster is None else ledger.nominated_waiter(cluster)
        yield Nominated(now, waiting.id, cluster)
        waiting = displaced


def _serve_waiter(
    ledger: Ledger, waiter: Reservation, freed: Set[ClusterId], now: datetime
) -> Iterator[Event]:
    wanted = waiter.request.resources
    usable = [cluster for cluster in freed if wanted.fits_in(ledger.cluster(cluster).ceiling)]
    may_fit = any(wanted.fits_in(ledger.available(cluster)) for cluster in usable)
    may_place = (usable or waiter.nominated_cluster is not None) and not _nomination_holds(
        ledger, waiter, freed, now
    )
    # A cluster may have opened, or a budget may have been reset: placing is better than nominating.
    placed = _try_place(ledger, waiter, now) if may_fit or may_place else None
    if placed is not None:
        yield placed
    elif may_place:
        yield from nominate(ledger, waiter, now)


def _retry_placement(ledger: Ledger, waiter: Reservation, now: datetime) -> Iterator[Event]:
    """Retries placement on all clusters."""
    placed = _try_place(ledger, waiter, now)
    if placed is not None:
        yield placed
    elif not _nomination_holds(ledger, waiter, ledger.clusters.keys(), now):
        yield from nominate(ledger, waiter, now)


def _try_place(ledger: Ledger, waiter: Reservation, now: datetime) -> Event | None:
    if quotas.blocked_by_quota(ledger, waiter):
        return None
    chosen = explanations.choose_cluster(
        quotas.query_for_reservation(ledger, waiter, now), ledger.fleet
    )
    if chosen is None:
        return None
    prices = ledger.cluster(chosen.cluster).advertisement.prices
    expires_at = now + waiter.request.duration
    return transitions.placed_event(waiter, chosen.cluster, prices, expires_at, Reason.LOCKED, now)


def _nomination_holds(
    ledger: Ledger, waiter: Reservation, freed: Set[ClusterId], now: datetime
) -> bool:
    """Whether the nominated cluster can still serve this request."""
    nominated = waiter.nominated_cluster
    cluster = None if nominated is None else ledger.clusters.get(nominated)
    if cluster is None or cluster.is_stale(now):
        return False
    row = ledger.fleet.find_row(cluster.id)
    if row is None or not ledger.fleet.is_within_hours(row, to_micros(now)):
        return False
    if cluster.id not in freed:
        return True  # unchanged since its nomination, apart from staleness and hours
    return bool(_eligible_clusters(ledger, waiter, now)[row])


def _nearest_cluster(ledger: Ledger, waiter: Reservation, now: datetime) -> ClusterId | None:
    """The cluster with the smallest missing share, among those that could serve the request."""
    fleet, possible = ledger.fleet, _eligible_clusters(ledger, waiter, now)
    if not possible.any():
        return None
    missing = filters.missing_shares(waiter.request, fleet)
    return fleet.ids[int(np.where(possible, missing, np.inf).argmin())]


def _eligible_clusters(ledger: Ledger, waiter: Reservation, now: datetime) -> Mask:
    """The clusters that could serve the request if they had lent nothing else."""
    fleet = ledger.fleet
    if quotas.blocked_by_quota(ledger, waiter):
        return np.zeros(len(fleet), np.bool_)
    possible = np.ones(len(fleet), np.bool_)
    for rejection, mask in filters.filter_masks(
        quotas.query_for_reservation(ledger, waiter, now), fleet
    ):
        if rejection not in _RESOLVED_BY_WAITING:
            possible &= mask
    for name, wanted in waiter.request.resources.items():
        ceiling, share = fleet.ceiling(name), fleet.requester_cap_left(name, waiter.requester)
        possible &= ceiling is not None and ceiling >= wanted
        possible &= share is None or share >= wanted
    return possible
