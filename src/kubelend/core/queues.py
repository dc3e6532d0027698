"""Who waits for capacity, and which cluster is kept for whom."""

from __future__ import annotations

from collections.abc import Mapping

from kubelend.core.fleet import Fleet
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId, Reservation, ReservationId


class Queue:
    """The waiters of one ledger, over its own reservations. Only the ledger changes it."""

    def __init__(self, reservations: Mapping[ReservationId, Reservation]) -> None:
        self._reservations = reservations
        self._waiting: dict[ReservationId, None] = {}
        self._earmarked: dict[ClusterId, ReservationId] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def in_order(self) -> list[Reservation]:
        """As they are served: by priority, then by age."""
        waiters = [self._reservations[found] for found in self._waiting]
        return sorted(waiters, key=lambda waiter: (-waiter.request.priority, waiter.ticket))

    def earmarked(self, cluster: ClusterId) -> Reservation | None:
        """The waiter that a cluster is kept for."""
        found = self._earmarked.get(cluster)
        return None if found is None else self._reservations[found]

    def put(self, before: Reservation | None, after: Reservation, fleet: Fleet) -> ClusterId | None:
        """Take a change in; gives the cluster that is not kept for it any more."""
        if after.phase is Phase.PENDING:
            self._waiting[after.id] = None
        else:
            self._waiting.pop(after.id, None)
        had = None if before is None else before.earmark
        if had == after.earmark:
            return None
        if had is not None and self._earmarked.get(had) == after.id:
            del self._earmarked[had]
            fleet.set_earmark(had, None)
        else:
            had = None  # somebody before it has taken the earmark over
        if after.earmark is not None:
            self._earmarked[after.earmark] = after.id
            fleet.set_earmark(after.earmark, (after.request.priority, after.ticket))
        return had

    def drop(self, cluster: ClusterId) -> None:
        """A cluster that exists no more is kept for nobody."""
        self._earmarked.pop(cluster, None)
