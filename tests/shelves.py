"""Every kind of store, on a shelf of its own: what the contract tests run on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from kubelend.broker import ports
from kubelend.core.events import Change
from kubelend.core.models import Cluster, ClusterId, Reservation, ReservationId
from kubelend.stores.memory import MemoryStore
from kubelend.stores.sqlite import SqliteStore

ARCHIVE_FOR = timedelta(days=30)


def in_memory(directory: Path) -> Callable[[], ports.Store]:
    """Opened again, it is still the same: there is no file that could be looked at afresh."""
    store = MemoryStore(archive_for=ARCHIVE_FOR)
    return lambda: store


def in_a_file(directory: Path) -> Callable[[], ports.Store]:
    return lambda: SqliteStore.open(directory / "store.db", archive_for=ARCHIVE_FOR)


KINDS = {"memory": in_memory, "sqlite": in_a_file}


class Shelf:
    """Where one store is kept. Each look at what it holds is taken after it was closed and opened."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._open = KINDS[kind](directory)
        self.store = self._open()

    def commit(self, *changes: Change, revision: int) -> None:
        self.store.commit(changes, revision)

    def reopened(self) -> ports.Store:
        self.store.close()
        self.store = self._open()
        return self.store

    def contents(
        self,
    ) -> tuple[dict[ClusterId, Cluster], dict[ReservationId, Reservation], int]:
        """Clusters and reservations by ID, and the revision."""
        loaded = self.reopened().load()
        clusters = {found.id: found for found in loaded.clusters}
        reservations = {found.id: found for found in loaded.reservations}
        assert len(clusters) == len(loaded.clusters)
        assert len(reservations) == len(loaded.reservations)
        return clusters, reservations, loaded.revision

    def archived(self, id: str) -> Reservation | None:
        return self.reopened().archived(ReservationId(id))
