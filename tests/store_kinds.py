"""Every kind of store, for the contract tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import kube_objects
from kubelend.broker import ports
from kubelend.core.events import Change
from kubelend.core.models import Cluster as Record
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.envtest.servers import LocalCluster
from kubelend.kube import config
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.stores.memory import MemoryStore
from kubelend.stores.sqlite import SqliteStore

ARCHIVE_FOR = timedelta(days=30)


def in_memory(directory: Path) -> Callable[[], ports.Store]:
    """Reopening returns the same store, because there is no file."""
    store = MemoryStore(archive_for=ARCHIVE_FOR)
    return lambda: store


def in_sqlite(directory: Path) -> Callable[[], ports.Store]:
    return lambda: SqliteStore.open(directory / "store.db", archive_for=ARCHIVE_FOR)


def in_kubernetes(cluster: LocalCluster) -> Callable[[], ports.Store]:
    namespace = new_namespace(cluster)
    found = config.config_from_kubeconfig(cluster.admin_kubeconfig)
    return lambda: KubernetesStore.open(found, namespace, archive_for=ARCHIVE_FOR)


def new_namespace(cluster: LocalCluster) -> str:
    return kube_objects.create_namespace(cluster, f"store-{secrets.token_hex(4)}")


LOCAL_KINDS = {"memory": in_memory, "sqlite": in_sqlite}
"""Kinds that need no API server."""

KINDS = [*LOCAL_KINDS, pytest.param("kubernetes", marks=pytest.mark.kube)]


class StoreUnderTest:
    """One store. Its contents are read after it was closed and opened again."""

    def __init__(self, open_store: Callable[[], ports.Store]) -> None:
        self._open = open_store
        self.store = self._open()

    @classmethod
    def of(cls, request: pytest.FixtureRequest) -> StoreUnderTest:
        """For a fixture whose parameters are `KINDS`."""
        kind: str = request.param
        if kind in LOCAL_KINDS:
            return cls(LOCAL_KINDS[kind](request.getfixturevalue("tmp_path")))
        return cls(in_kubernetes(request.getfixturevalue("kube")))

    def commit(self, *changes: Change, revision: int) -> None:
        """In two steps, as the broker does it."""
        self.store.prepare(changes, revision)()

    def reopened(self) -> ports.Store:
        self.store.close()
        self.store = self._open()
        return self.store

    def contents(
        self,
    ) -> tuple[dict[ClusterId, Record], dict[ReservationId, Reservation], int]:
        """Clusters and reservations by ID, and the revision."""
        loaded = self.reopened().load()
        clusters = {found.id: found for found in loaded.clusters}
        reservations = {found.id: found for found in loaded.reservations}
        assert len(clusters) == len(loaded.clusters)
        assert len(reservations) == len(loaded.reservations)
        return clusters, reservations, loaded.revision

    def archived(self, id: str) -> Reservation | None:
        return self.reopened().archived(ReservationId(id))
