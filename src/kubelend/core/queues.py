"""Waiting requests and nominated clusters."""

from __future__ import annotations

from collections.abc import Mapping

from kubelend.core.fleet import Fleet
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId, Reservation, ReservationId


class WaitQueue:
    """Waiting requests, and the clusters nominated for them."""

    def __init__(self, reservations: Mapping[ReservationId, Reservation]) -> None:
        self._reservations = reservations
        self._waiting: dict[ReservationId, None] = {}
        self._nominated: dict[ClusterId, ReservationId] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def in_order(self) -> list[Reservation]:
        """In serving order: by priority, then by age."""
        waiters = [self._reservations[found] for found in self._waiting]
        return sorted(waiters, key=lambda waiter: (-waiter.request.priority, waiter.ticket))

    def nominated_waiter(self, cluster: ClusterId) -> Reservation | None:
        """The waiting request for which a cluster is nominated."""
        found = self._nominated.get(cluster)
        return None if found is None else self._reservations[found]

    def put(self, before: Reservation | None, after: Reservation, fleet: Fleet) -> ClusterId | None:
        """Applies a change of a reservation; returns the cluster that is no longer nominated for it."""
        if after.phase is Phase.PENDING:
            self._waiting[after.id] = None
        else:
            self._waiting.pop(after.id, None)
        had = None if before is None else before.nominated_cluster
        if had == after.nominated_cluster:
            return None
        if had is not None and self._nominated.get(had) == after.id:
            del self._nominated[had]
            fleet.set_nomination(had, None)
        else:
            had = None  # a request of higher rank has taken over the nomination
        if after.nominated_cluster is not None:
            self._nominated[after.nominated_cluster] = after.id
            fleet.set_nomination(after.nominated_cluster, (after.request.priority, after.ticket))
        return had

    def remove_cluster(self, cluster: ClusterId) -> None:
        """Removes the nomination of a deleted cluster."""
        self._nominated.pop(cluster, None)
