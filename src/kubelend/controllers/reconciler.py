"""Base of the reconcilers for the broker's own objects: queue and drift detection.

`controllers.reservations` and `controllers.advertisements` implement `Reconciler` for their kind.
Level-triggered: a reconcile compares the object with its record in the ledger, whatever event caused it, and
does what is missing. An object that cannot be decoded is skipped, so that it cannot stop the broker. Any
exception but a `KubelendError` is a bug and ends the task.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, NamedTuple

import structlog

from kubelend.broker.service import Broker
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.controllers import labels
from kubelend.core.audit_log import Actor
from kubelend.core.errors import Conflict, NotFound, Unavailable
from kubelend.core.ledger import Ledger
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.events import EventRecorder
from kubelend.kube.informer import CachedKind, InformerCache
from kubelend.kube.resources import Resource
from kubelend.wire.events import EventRecord, ObjectReference
from kubelend.wire.objects import Metadata, Object

ORPHAN_DELETED: Final = (
    "Deleted because it was labelled as managed by the broker, which has no record of it"
)

log = structlog.get_logger("kubelend.controllers")


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
        self.queue = ReconcileQueue(resource.plural, self.reconcile, log)
        self.cache: InformerCache[CachedKind] = InformerCache(self._enqueue, self._on_update)
        self.resource = resource
        self._broker = broker
        self._client = client
        self._namespace = namespace
        self._recorder = recorder
        self._undecodable: dict[str, UndecodableObject] = {}
        """Undecodable objects by name, to emit one Event for each error."""
        self._drift = DriftTracker(self.queue)

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

    def _events(self, before: CachedKind, after: CachedKind) -> Iterable[EventRecord]:
        """The Events to emit for an update."""
        del before, after
        return ()

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
        if (undecodable := self.cache.undecodable(name)) is not None:
            self._report_undecodable(undecodable)
            return  # it exists, whatever its content
        self._undecodable.pop(name, None)
        found = self.cache.find(name)
        if found is not None:
            await self._sync(found)
        elif self.cache.has_synced:
            await self._on_missing(name)

    def _on_update(self, before: CachedKind, after: CachedKind) -> None:
        if self._broker.is_leader:
            for event in self._events(before, after):
                self._recorder.emit(event)

    async def _patch(
        self, found: CachedKind, change: dict[str, dict[str, object]], subresource: str = ""
    ) -> CachedKind | None:
        """None if the object has changed or is deleted meanwhile. After a conflict it is enqueued."""
        name, version = found.metadata.name, found.metadata.resource_version
        metadata = {**change.get("metadata", {}), "resourceVersion": version}
        try:
            return await self._client.patch(
                *(self.resource, name, self._namespace, {**change, "metadata": metadata}),
                subresource=subresource,
            )
        except Conflict:
            self._enqueue(name)
        except NotFound:  # the watch reports the deletion
            pass
        return None

    def _report_undecodable(self, found: UndecodableObject) -> None:
        if self._undecodable.get(found.name) != found:
            self._undecodable[found.name] = found
            about = ObjectReference(
                self.resource.type, Metadata(found.name, found.namespace, found.uid)
            )
            message = f"Skipped: {found.error}"
            self._recorder.emit(EventRecord("Warning", "Undecodable", message, about))

    async def _delete_orphan(self, found: CachedKind) -> None:
        """Delete it as it was read. If it has changed since, it may be no orphan any more."""
        if await labels.delete_if_unchanged(self._client, self.resource, found):
            self._recorder.emit(EventRecord("Warning", "OrphanDeleted", ORPHAN_DELETED, found))
        else:
            self._enqueue(found.metadata.name)

    async def _read_current(self, name: str) -> CachedKind | None:
        """The object as it is on the server, after all decisions so far were written."""
        await self._broker.wait_written()
        return await self._client.find(self.resource, name, self._namespace)


TICK_SECONDS: Final = 1.0
"""Seconds. Changes caused by time alone are noticed at most this late; decisions use the clock itself."""


class NextDue:
    """The earliest of the moments it was set to, until it is cleared."""

    def __init__(self) -> None:
        self._at = _NEVER

    def set(self, at: datetime) -> None:
        self._at = min(self._at, at)

    def clear(self) -> None:
        self._at = _NEVER

    def is_due(self, now: datetime) -> bool:
        return self._at <= now

    def has_passed(self, due: datetime | None, now: datetime) -> bool:
        """Whether `due` has passed; if it lies in the future, it is noted."""
        if due is not None and due > now:
            self.set(due)
        return due is not None and due <= now


_NEVER: Final = datetime.max.replace(tzinfo=UTC)


DRIFT_GRACE: Final = timedelta(seconds=1)
"""Without a change of the object."""
DRIFT_DEADLINE: Final = timedelta(seconds=5)
"""Even if the object changes meanwhile."""
MAX_REPAIRS: Final = 3


class _Drift(NamedTuple):
    version: str
    since: float


class _Repairs(NamedTuple):
    drift: object
    number: int
    version: str
    """Of the object at the last attempt."""


class DriftTracker:
    """Drift of the objects of one kind, by name."""

    def __init__(
        self, queue: ReconcileQueue[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._since: dict[str, _Drift] = {}
        self._repairs: dict[str, _Repairs] = {}

    def is_persistent(self, found: Object) -> bool:
        """Whether the drift has lasted; if not, the object is enqueued again."""
        name, version, now = found.metadata.name, found.metadata.resource_version, self._clock()
        known = self._since.get(name)
        if known is not None and known.version == version:
            return True
        since = now if known is None else known.since
        is_lasting = now - since >= DRIFT_DEADLINE.total_seconds()
        self._since[name] = _Drift(version, now if is_lasting else since)
        if not is_lasting:
            self._queue.add_after(name, DRIFT_GRACE)
        return is_lasting

    def may_repair(self, found: Object, drift: object) -> bool:
        """Whether to try a repair; the number of attempts for the same drift is limited."""
        name, version = found.metadata.name, found.metadata.resource_version
        before = self._repairs.get(name)
        count = 1
        if before is not None and before.drift == drift:
            has_given_up = before.number > MAX_REPAIRS
            if not has_given_up or before.version == version:  # else written by others since
                count = before.number + 1
        self._repairs[name] = _Repairs(drift, min(count, MAX_REPAIRS + 1), version)
        return count <= MAX_REPAIRS

    def clear(self, found: Object) -> None:
        """The object agrees with its record, or is deleted."""
        self._since.pop(found.metadata.name, None)
        self._repairs.pop(found.metadata.name, None)
