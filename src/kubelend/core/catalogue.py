"""Indexes of the ledger: reservations, held resources, wait queue, deadlines, limits and members.

Each is maintained by the ledger alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter

from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, RequestKey, Reservation, ReservationId


class ReservationIndex:
    """Reservations by ID, by idempotency key and by cluster."""

    def __init__(self) -> None:
        self.by_id: dict[ReservationId, Reservation] = {}
        self.phase_counts: Counter[tuple[Phase, Reason]] = Counter()
        """Number of reservations by phase and reason."""
        self._by_key: dict[tuple[ClusterId, RequestKey], ReservationId] = {}
        self._by_cluster: defaultdict[ClusterId, dict[ReservationId, None]] = defaultdict(dict)

    def by_key(self, requester: ClusterId, key: RequestKey) -> Reservation | None:
        found = self._by_key.get((requester, key))
        return None if found is None else self.by_id[found]

    def by_cluster(self, cluster: ClusterId) -> Iterator[Reservation]:
        """Reservations with this cluster as requester, provider or previous provider, unordered."""
        return (self.by_id[found] for found in self._by_cluster.get(cluster, ()))

    def put(self, before: Reservation | None, after: Reservation) -> None:
        self.by_id[after.id] = after
        self.phase_counts[after.phase, after.reason] += 1
        if before is not None:
            self.phase_counts[before.phase, before.reason] -= 1
        self._index(after)
        if before is None:
            self._set_key(after)

    def load(self, reservations: Sequence[Reservation]) -> None:
        """Adds many new reservations."""
        self.by_id.update(zip(map(attrgetter("id"), reservations), reservations, strict=True))
        self.phase_counts.update(map(attrgetter("phase", "reason"), reservations))
        for reservation in reservations:
            self._index(reservation)
            self._set_key(reservation)

    def remove(self, reservation: ReservationId) -> Reservation:
        gone = self.by_id.pop(reservation)
        self.phase_counts[gone.phase, gone.reason] -= 1
        for cluster in gone.involved_clusters:
            self._by_cluster[cluster].pop(gone.id, None)
            if not self._by_cluster[cluster]:
                del self._by_cluster[cluster]
        self._remove_key(gone)
        return gone

    def _set_key(self, born: Reservation) -> None:
        if born.request.key is not None:
            self._by_key[born.requester, born.request.key] = born.id

    def _remove_key(self, gone: Reservation) -> None:
        if gone.request.key is None:
            return
        key = gone.requester, gone.request.key
        if self._by_key.get(key) == gone.id:  # otherwise the key belongs to a newer reservation
            del self._by_key[key]

    def _index(self, reservation: Reservation) -> None:
        found = reservation.id
        self._by_cluster[reservation.requester][found] = None
        if reservation.target is not None:
            self._by_cluster[reservation.target][found] = None
        for cluster in reservation.left:
            self._by_cluster[cluster][found] = None
