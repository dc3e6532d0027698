"""The store that forgets: for tests, and for a broker that may start anew after every stop."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from kubelend.core.errors import StoreFailed
from kubelend.core.events import Change
from kubelend.core.models import Cluster, ClusterId, Records, Reservation, ReservationId
from kubelend.stores import batches
from kubelend.stores.batches import Batch


class MemoryStore:
    """Keeps records for as long as the process lives."""

    def __init__(self, *, archive_for: timedelta = batches.ARCHIVE_FOR) -> None:
        self._archive_for = archive_for
        self._clusters: dict[ClusterId, Cluster] = {}
        self._reservations: dict[ReservationId, Reservation] = {}
        self._archive: dict[ReservationId, Reservation] = {}
        self._revision = 0

    def load(self) -> Records:
        return Records(
            list(self._clusters.values()), list(self._reservations.values()), self._revision
        )

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        batch = batches.fold(changes)
        self._check(batch, revision)
        self._revision = revision
        self._reservations.update(batch.reservations)
        for id, cluster in batch.clusters.items():
            if cluster is None:
                self._clusters.pop(id, None)
            else:
                self._clusters[id] = cluster
        if batch.archived:
            self._move_to_archive(batch.archived)

    def archived(self, reservation: ReservationId) -> Reservation | None:
        return self._archive.get(reservation)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _check(self, batch: Batch, revision: int) -> None:
        """Refuse before the first change, for nothing could take it back."""
        if revision < self._revision:
            raise StoreFailed(f"the store is at revision {self._revision}, ahead of {revision}")
        for id in batch.archived:
            batches.finish(id, batch.reservations.get(id) or self._reservations.get(id))

    def _move_to_archive(self, ids: list[ReservationId]) -> None:
        joining = {id: self._reservations.pop(id) for id in ids}
        self._archive |= joining
        finishes = {id: batches.finish(id, found) for id, found in self._archive.items()}
        kept_from = batches.kept_from((finishes[id] for id in joining), self._archive_for)
        for id, finished_at in finishes.items():
            if finished_at < kept_from:
                del self._archive[id]
