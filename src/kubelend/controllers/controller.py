"""Base of the reconcilers for the broker's own objects: queue, drift detection, record verification.

`controllers.reservations` and `controllers.advertisements` implement `Reconciler` for their kind.
Level-triggered: a reconcile compares the object with its record in the ledger, whatever event caused it, and
does what is missing. An object that cannot be decoded is skipped, so that it cannot stop the broker. Any
exception but a `KubelendError` is a bug and ends the task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Generic

from kubelend.broker.service import Broker
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.controllers.happenings import EventRecord, EventRecorder, UndecodableReporter
from kubelend.controllers.looking import ReconcileQueue
from kubelend.controllers.mirrors import CachedKind, InformerCache, Update
from kubelend.controllers.suspicions import DriftTracker
from kubelend.core.errors import Unavailable
from kubelend.core.journal import Actor
from kubelend.core.ledger import Ledger
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.stores.kube_inspecting import RecordVerifier


class Reconciler(ABC, Generic[CachedKind]):
    """Pass watch events to `cache.handle`, run `queue`, and call `tick` regularly."""

    def __init__(
        self,
        resource: Resource[CachedKind],
        broker: Broker,
        client: Client,
        namespace: str,
        recorder: EventRecorder,
    ) -> None:
        self.queue = ReconcileQueue(resource.plural, self.reconcile)
        self.cache: InformerCache[CachedKind] = InformerCache(self._enqueue, self._on_update)
        self._resource = resource
        self._broker = broker
        self._client = client
        self._namespace = namespace
        self._recorder = recorder
        self._undecodable = UndecodableReporter(resource.type, recorder)
        self._drift = DriftTracker(self.queue)
        self._verifier = RecordVerifier(client, namespace)

    def enqueue_all(self) -> None:
        """After the ledger was reloaded, or this broker became the leader."""
        self.cache.enqueue_all()
        self.enqueue_missing()

    def enqueue_missing(self) -> None:
        """Objects may have been deleted while nothing was watching, and their records are still there."""
        if not self.cache.has_synced:
            return
        # A broker that has lost leadership without noticing yet enqueues everything again when it does.
        with suppress(Unavailable):
            ledger, _ = self._broker.current()
            for name in self._expected_names(ledger):
                if self.cache.find(name) is None and self.cache.undecodable(name) is None:
                    self.queue.add(name)

    @abstractmethod
    def tick(self) -> None:
        """Enqueue what only the passing of time affects."""

    # -- what a kind implements

    @abstractmethod
    def _enqueue(self, name: str) -> None:
        """Enqueue the object."""

    @abstractmethod
    def _events(self, update: Update[CachedKind]) -> Iterable[EventRecord]:
        """The Events to emit for an update."""

    @abstractmethod
    def _expected_names(self, ledger: Ledger) -> Iterable[str]:
        """The names of the objects that must exist."""

    @abstractmethod
    async def _sync(self, found: CachedKind) -> None:
        """Bring object and record into agreement."""

    @abstractmethod
    async def _on_missing(self, name: str) -> None:
        """The object does not exist: check whether it should."""

    @abstractmethod
    async def _finalize(self, deleted: CachedKind) -> None:
        """Handle the deletion of an object."""

    def _forget(self, deleted: CachedKind) -> None:
        """Drop all state about a deleted object."""
        self._drift.clear(deleted)
        self.cache.forget(deleted)

    # -- reconcile

    async def reconcile(self, name: str) -> None:
        if not self._broker.is_leader:
            for deleted in self.cache.tombstones(name):  # the leader handles the deletion
                self._forget(deleted)
            return
        CURRENT_ACTOR.set(Actor(f"{self._namespace}/{name}", "object"))
        for deleted in self.cache.tombstones(name):
            await self._finalize(deleted)
            self._forget(deleted)
        unreadable = self.cache.undecodable(name)
        self._undecodable.report(name, unreadable)
        if unreadable is not None:
            return  # it exists, whatever its content
        found = self.cache.find(name)
        if found is not None:
            await self._sync(await self._verifier.verified(found))
        elif self.cache.has_synced:
            await self._on_missing(name)

    def _on_update(self, update: Update[CachedKind]) -> None:
        if self._broker.is_leader:
            for event in self._events(update):
                self._recorder.emit(event)

    async def _read_current(self, name: str) -> CachedKind | None:
        """The object as it is on the server, after all decisions so far were written."""
        await self._broker.wait_durable()
        found = await self._client.find(self._resource, name, self._namespace)
        return found and await self._verifier.verified(found)
