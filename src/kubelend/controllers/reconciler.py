"""Base of the reconcilers for the broker's own objects: queue, drift detection, record verification.

`controllers.reservations` and `controllers.advertisements` implement `Reconciler` for their kind.
Level-triggered: a reconcile compares the object with its record in the ledger, whatever event caused it, and
does what is missing. An object that cannot be decoded is skipped, so that it cannot stop the broker. Any
exception but a `KubelendError` is a bug and ends the task.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.broker.service import Broker
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.controllers import events, labels
from kubelend.controllers.events import EventRecord, EventRecorder, UndecodableReporter
from kubelend.core.audit_log import Actor
from kubelend.core.errors import KubelendError, LimitExceeded, Unavailable
from kubelend.core.ledger import Ledger
from kubelend.kits.workqueue import Workqueue
from kubelend.kube.client import Client
from kubelend.kube.informer import CachedKind, InformerCache, Update
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes import head as kubernetes_head
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.cache import TAMPERED
from kubelend.stores.kubernetes.objects import HEAD_NAME, LEDGER_RECORDS, RecordKind
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation, StoredRecord
from kubelend.wire.objects import Object


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


VerifiedKind = TypeVar("VerifiedKind", bound=Object)


class RecordVerifier:
    """Verifies objects of one namespace. Reads the key when needed, and again before a mismatch counts."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._key = ""

    async def verified(self, found: VerifiedKind) -> VerifiedKind:
        """The object; if its record was not written by the broker, with an empty record."""
        if not isinstance(found, ClusterAdvertisement | Reservation):
            return found
        record = found.status.record
        if record is None or await self._is_valid(
            _RECORD_KINDS[type(found)], found.metadata.name, record
        ):
            return found
        tampered = replace(record, revision=TAMPERED, data="")
        return replace(found, status=replace(found.status, record=tampered))

    async def _is_valid(self, kind: RecordKind, name: str, record: StoredRecord) -> bool:
        if self._key and objects.verify(self._key, kind, name, record):
            return True
        head = await self._client.find(LEDGER_RECORDS, HEAD_NAME, self._namespace)
        if head is None:
            return True  # without the head nothing can be verified
        with objects.translate_api_errors(self._client.config.server, self._namespace):
            self._key = kubernetes_head.state_from_object(head).key
        return objects.verify(self._key, kind, name, record)


_RECORD_KINDS: Final[dict[type[Object], RecordKind]] = {
    ClusterAdvertisement: "cluster",
    Reservation: "reservation",
}


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


log = structlog.get_logger("kubelend.controllers")


class ReconcileQueue:
    """Reconciles objects of one kind by name."""

    def __init__(self, kind: str, reconcile: Callable[[str], Awaitable[None]]) -> None:
        self._kind = kind
        self._reconcile = reconcile
        self._queue: Workqueue[str] = Workqueue()
        self._logged_errors: dict[str, str] = {}

    def add(self, name: str) -> None:
        self._queue.add(name)

    def add_after(self, name: str, delay: timedelta) -> None:
        self._queue.add_after(name, delay)

    async def run(self) -> None:
        """Runs until cancelled."""
        await self._queue.run(self._attempt)

    async def _attempt(self, name: str) -> None:
        try:
            await self._reconcile(name)
        except KubelendError as error:
            self._queue.retry(name, _retry_after(error))
            self._log_once("Reconcile failed, will retry", name, error.code, error)
        except msgspec.MsgspecError as error:  # a retry would not help until the object is changed
            self._queue.forget(name)
            self._log_once("Skipping invalid object", name, str(error), error)
        else:
            self._queue.forget(name)
            if self._logged_errors.pop(name, None) is not None:
                log.info("Reconcile recovered", kind=self._kind, name=name)

    def _log_once(self, message: str, name: str, cause: str, error: Exception) -> None:
        if self._logged_errors.get(name) != cause:
            self._logged_errors[name] = cause
            log.warning(message, kind=self._kind, name=name, error=str(error))


def _retry_after(error: KubelendError) -> timedelta:
    """The pause that the error asks for."""
    request = error.retry_after if isinstance(error, LimitExceeded | Unavailable) else 0.0
    return timedelta(seconds=request)


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

    def __init__(self, queue: ReconcileQueue, clock: Callable[[], float] = time.monotonic) -> None:
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
        is_same = (
            before is not None
            and before.drift == drift
            and not _was_written_by_others(before, version)
        )
        count = before.number + 1 if before is not None and is_same else 1
        self._repairs[name] = _Repairs(drift, min(count, MAX_REPAIRS + 1), version)
        return count <= MAX_REPAIRS

    def clear(self, found: Object) -> None:
        """The object agrees with its record, or is deleted."""
        self._since.pop(found.metadata.name, None)
        self._repairs.pop(found.metadata.name, None)


def _was_written_by_others(before: _Repairs, version: str) -> bool:
    """Whether others have written the object since the broker gave up."""
    return before.number > MAX_REPAIRS and before.version != version


async def delete_orphan(
    client: Client, resource: Resource[CachedKind], found: CachedKind, recorder: EventRecorder
) -> bool:
    """Delete the orphan as it was read. False if it has changed since and may be no orphan any more."""
    is_gone = await labels.delete_if_unchanged(client, resource, found)
    if is_gone:
        recorder.emit(events.orphan_deleted_event(found))
    return is_gone
