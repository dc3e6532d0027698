"""Applies committed changes to Kubernetes objects. Idempotent.

The commit is durable in the head before. An object that has the record of this commit or of a later one is
not touched, and every write is conditional on the version that was read. So an interrupted apply can start
again, and a broker that was suspended cannot undo the writes of its successor.

Objects are created as placeholders, and get their record only if the head is still this store's own:
otherwise an object that the successor has deleted meanwhile would come back.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kubelend.core.errors import InvalidInput, StoreFailed
from kubelend.core.events import StoreLag
from kubelend.core.models import Reservation
from kubelend.kits import tasks
from kubelend.kits.backoff import Backoff
from kubelend.kube import resources
from kubelend.stores.kubernetes import cache as kubernetes_cache
from kubelend.stores.kubernetes import objects, projection
from kubelend.stores.kubernetes.cache import (
    NO_RECORD,
    CachedObject,
    ObjectKey,
    StaleWrite,
    StoredObjectCache,
)
from kubelend.stores.kubernetes.head import CommitChanges, PackedChanges, PendingWrite, RecordWrite
from kubelend.stores.kubernetes.objects import AnyStoredObject, Spec, StoredObject
from kubelend.stores.kubernetes.projection import Projection
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, LedgerRecord, StoredRecord
from kubelend.wire.objects import Metadata

MAX_WRITE_ATTEMPTS: Final = 50
"""How often a write is tried again that conflicts with writes of others."""
MAX_PENDING_WRITES: Final = 1_000
"""With so many a commit waits, so the objects never lag further behind."""
MAX_ROUND_WRITES: Final = 100
BUSY_SECONDS: Final = 1.0
BUSY_WRITERS: Final = 4
"""Writes at a time if the last commit is so recent: more would delay the commits that callers wait for."""
RETRY_BACKOFF: Final = Backoff(sys.maxsize, first=timedelta(seconds=1))

FencingCheck = Callable[[], Awaitable[None]]
"""Raises `StoreFailed` if the head is not this store's own any more."""

Result = TypeVar("Result")


async def apply_writes(
    cache: StoredObjectCache,
    pending: Iterable[PendingWrite],
    check_fencing: FencingCheck,
    limit: int = tasks.MAX_CONCURRENCY,
) -> None:
    """Bring the objects into agreement with these changes, `limit` writes at a time."""
    writes = [_object_write(change, sequence) for sequence, change in pending]
    work = ObjectApplier(cache, check_fencing, limit)
    # Releases first: the objects must never show more reserved than there is.
    for takes in (False, True):
        await work.apply([write for write in writes if write.takes_capacity is takes])


async def delete_object(cache: StoredObjectCache, key: ObjectKey, cached: CachedObject) -> None:
    """Delete an object as it was read; `StaleWrite` if it has changed."""
    if cached.has_finalizer:
        cached = await _remove_finalizer(cache, key, cached)
    await cache.delete(key, cached)


def hour_label(at: datetime) -> str:
    """As in the label of archived reservations."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H}"


async def _retry_conflicts(
    cache: StoredObjectCache,
    key: ObjectKey,
    cached: CachedObject | None,
    attempt: Callable[[CachedObject | None], Awaitable[Result]],
) -> Result:
    """Write the object as it is cached; after each conflict as it is on the server."""
    for _ in range(MAX_WRITE_ATTEMPTS):
        try:
            return await attempt(cached)
        except StaleWrite:
            cached = await cache.refresh(key)
    raise StoreFailed(
        f"{kubernetes_cache.resource_for(key[0])} {key[1]}: too many conflicting writes by others",
        hint="find the other writer with `kubectl get --show-managed-fields`",
    )


class PendingCommit(NamedTuple):
    packed: PackedChanges
    changes: CommitChanges
    since: float
    """By the monotonic clock."""


class PendingCommits:
    """The commits that may not be in the objects yet, and the task that writes them.

    One round after the other writes all that is pending then, each object once. After an error it tries
    again; until a round succeeds, the error is raised to whoever commits or waits.
    """

    def __init__(
        self,
        apply: Callable[[Sequence[CommitChanges], int], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._apply = apply
        self._clock = clock
        self._commits: deque[PendingCommit] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._progress = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def packed(self) -> tuple[PackedChanges, ...]:
        return tuple(commit.packed for commit in self._commits)

    @property
    def commits(self) -> list[CommitChanges]:
        return [commit.changes for commit in self._commits]

    def lag(self, committed: int) -> StoreLag:
        """May be called in any thread."""
        waiting = tuple(self._commits)
        changes = sum(len(commit.changes.writes) for commit in waiting)
        seconds = self._clock() - waiting[0].since if waiting else 0.0
        written = waiting[0].changes.sequence - 1 if waiting else committed
        return StoreLag(committed, written, changes, seconds)

    def add(self, packed: PackedChanges, changes: CommitChanges) -> None:
        self._commits.append(PendingCommit(packed, changes, self._clock()))

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="objects")

    async def wait(self, most: int = 0) -> None:
        """Wait until so many changes are pending at most; raise the error of the last round."""
        while True:
            if self._failure is not None:
                raise self._failure
            if not self._commits or sum(len(one.changes.writes) for one in self._commits) < most:
                return
            self.start()
            await self._progress.wait()

    async def stop(self) -> None:
        """End after the writes in progress: cancelling one would leave a half-open connection."""
        self._stopped.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        delays = RETRY_BACKOFF.delays()
        while self._commits and not self._stopped.is_set():
            failure = await self._try_round()
            if failure is None:
                delays = RETRY_BACKOFF.delays()
            self._failure = failure
            progress, self._progress = self._progress, asyncio.Event()
            progress.set()
            if failure is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(next(delays)):
                        await self._stopped.wait()

    async def _try_round(self) -> Exception | None:
        commits = self._next_round()
        is_busy = self._clock() - self._commits[-1].since < BUSY_SECONDS
        limit = BUSY_WRITERS if is_busy else tasks.MAX_CONCURRENCY
        try:
            await self._apply([commit.changes for commit in commits], limit)
        except Exception as error:  # noqa: BLE001 - raised by the next commit
            return error
        for _ in commits:
            self._commits.popleft()
        return None

    def _next_round(self) -> list[PendingCommit]:
        """Not all if there are many: only a whole round makes room for commits."""
        chosen: list[PendingCommit] = []
        count = 0
        for commit in self._commits:
            chosen.append(commit)
            count += len(commit.changes.writes)
            if count >= MAX_ROUND_WRITES:
                break
        return chosen


class ObjectWrite(NamedTuple):
    """A change of a record, with all that does not depend on the object."""

    change: RecordWrite
    key: ObjectKey
    sequence: int
    projection: Projection
    record: StoredRecord
    takes_capacity: bool
    """Whether the reservation holds capacity from now on."""
    is_finished: bool
    request_uid: str = ""
    """Of the object that requested it; empty if it was not requested by an object."""

    @property
    def stays_deleted(self) -> bool:
        """Whether a missing object is not created again, because its user has deleted it."""
        return bool(self.request_uid) or (self.is_finished and self.change.existed_before)

    @property
    def needs_finalizer(self) -> bool:
        return self.change.kind == "reservation" and not self.change.is_archived

    def is_for_another(self, cached: CachedObject) -> bool:
        """Whether the reservation's object was deleted, and another one of its name created since."""
        is_request = self.change.kind == "reservation" and cached.is_unadopted
        return is_request and cached.uid != self.request_uid


def _object_write(change: RecordWrite, sequence: int) -> ObjectWrite:
    key = kubernetes_cache.object_key(change)
    if not change.text:
        nothing = projection.EMPTY_PROJECTION
        return ObjectWrite(
            change, key, sequence, nothing, NO_RECORD, takes_capacity=False, is_finished=True
        )
    record = projection.decode_record_text(change.kind, change.text)
    stored = projection.stored_record(change.kind, change.id, change.text, sequence)
    projected = projection.project(record)
    if not isinstance(record, Reservation):
        return ObjectWrite(
            change, key, sequence, projected, stored, takes_capacity=False, is_finished=False
        )
    is_over, uid = record.finished_at is not None, objects.requesting_uid(record)
    return ObjectWrite(change, key, sequence, projected, stored, record.is_live, is_over, uid)


class ObjectApplier:
    """Carries out writes concurrently."""

    def __init__(self, cache: StoredObjectCache, check: FencingCheck, limit: int) -> None:
        self._cache = cache
        self._check_fencing = check
        self._limit = limit

    async def apply(self, writes: list[ObjectWrite]) -> None:
        puts = [write for write in writes if write.record.data]
        others = [write for write in writes if not write.record.data]
        await tasks.gather_limited(self._delete_or_archive, others, self._limit)
        prepared = await tasks.gather_limited(self._prepare, puts, self._limit)
        if any(_has_no_record(cached) for cached in prepared):
            await self._check_fencing()  # once for all: it is a call
        both = list(zip(puts, prepared, strict=True))
        await tasks.gather_limited(lambda pair: self._write_or_retry(*pair), both, self._limit)

    async def _write_or_retry(self, write: ObjectWrite, prepared: CachedObject | None) -> None:
        try:
            await self._write_record(write, prepared)
        except StaleWrite:  # written by others at the same time
            current = await self._cache.refresh(write.key)
            attempt = partial(self._apply_alone, write)
            await _retry_conflicts(self._cache, write.key, current, attempt)

    async def _apply_alone(self, write: ObjectWrite, cached: CachedObject | None) -> None:
        prepared = await self._prepare_existing(write, cached)
        if _has_no_record(prepared):
            await self._check_fencing()
        await self._write_record(write, prepared)

    async def _prepare(self, write: ObjectWrite) -> CachedObject | None:
        """The object, created if needed, with the right spec; None if it has this record or a newer one.

        An unknown object is usually new. It is created without a read: the server reports a conflict.
        """
        cached = self._cache.cached(write.key)
        if cached is None and write.stays_deleted:
            cached = await self._cache.refresh(write.key)
        attempt = partial(self._prepare_existing, write)
        return await _retry_conflicts(self._cache, write.key, cached, attempt)

    async def _prepare_existing(
        self, write: ObjectWrite, cached: CachedObject | None
    ) -> CachedObject | None:
        if cached is None:
            return None if write.stays_deleted else await self._create(write)
        if write.is_for_another(cached):
            return None
        if cached.sequence < write.sequence:
            return await self._correct(write, cached)
        await self._remove_finalizer_if_finished(write, cached)
        return None

    async def _create(self, write: ObjectWrite) -> CachedObject:
        namespace, full = self._cache.namespace, write.projection
        try:
            return await self._cache.create(write.key, _placeholder(write, full.spec, namespace))
        except InvalidInput:
            spec = projection.minimal(full).spec
            return await self._cache.create(write.key, _placeholder(write, spec, namespace))

    async def _correct(self, write: ObjectWrite, cached: CachedObject) -> CachedObject:
        """Correct edits, and apply changes, outside of the status."""
        metadata, spec = _metadata_patch(write, cached), _spec_patch(write, cached)
        if spec:
            # The spec is informative: the record follows, even if the spec is rejected.
            with suppress(InvalidInput):
                change = {"metadata": metadata, "spec": spec}
                return await self._cache.patch(write.key, cached, change)
        if metadata:
            return await self._cache.patch(write.key, cached, {"metadata": metadata})
        return cached

    async def _write_record(self, write: ObjectWrite, cached: CachedObject | None) -> None:
        """Write the record, which makes it valid."""
        if cached is not None:
            patched = await self._patch_record(write, cached)
            if not patched.sequence:
                raise objects.record_dropped_error(kubernetes_cache.resource_for(write.key[0]).kind)
            await self._remove_finalizer_if_finished(write, patched)

    async def _patch_record(self, write: ObjectWrite, cached: CachedObject) -> CachedObject:
        known, full = write.record, write.projection
        record = {"revision": known.revision, "checksum": known.checksum, "data": known.data}
        if not full.status:
            return await self._cache.patch(write.key, cached, {"record": record})

        async def patch(status: projection.Status) -> CachedObject:
            change, at = {"status": {**status, "record": record}}, full.finished_at
            return await self._cache.patch(
                write.key, cached, change, subresource="status", finished_at=at
            )

        try:
            return await patch(full.status)
        except InvalidInput:
            return await patch(projection.minimal(full).status)

    async def _remove_finalizer_if_finished(self, write: ObjectWrite, cached: CachedObject) -> None:
        """The finalizer of a finished reservation that its user has deleted is removed."""
        if write.is_finished and cached.is_being_deleted and cached.has_finalizer:
            await _remove_finalizer(self._cache, write.key, cached)

    async def _delete_or_archive(self, write: ObjectWrite) -> None:
        cached = await self._cache.get(write.key)
        attempt = partial(self._delete_or_archive_existing, write)
        await _retry_conflicts(self._cache, write.key, cached, attempt)

    async def _delete_or_archive_existing(
        self, write: ObjectWrite, cached: CachedObject | None
    ) -> None:
        if cached is None or cached.sequence > write.sequence or write.is_for_another(cached):
            return
        if not write.change.is_archived:
            if not cached.is_unadopted:
                await delete_object(self._cache, write.key, cached)
        elif metadata := _metadata_patch(write, cached):
            await self._cache.patch(write.key, cached, {"metadata": metadata})
        self._cache.forget(write.key)


def _has_no_record(cached: CachedObject | None) -> bool:
    """Whether it has no valid record: then only the head determines who may write one."""
    return cached is not None and cached.sequence <= 0


def _placeholder(write: ObjectWrite, spec: Spec, namespace: str) -> AnyStoredObject:
    kind, name = write.key
    if kind not in {"cluster", "reservation"}:
        metadata = Metadata(name, namespace, labels=objects.ledger_record_labels(kind))
        return LedgerRecord(metadata, kind, NO_RECORD)
    labels = {objects.MANAGED_BY: objects.MANAGED_BY_BROKER, **_archive_labels(write.change)}
    finalizers = (RESERVATION_FINALIZER,) if write.needs_finalizer else ()
    return StoredObject(Metadata(name, namespace, finalizers=finalizers, labels=labels), spec)


def _metadata_patch(write: ObjectWrite, cached: CachedObject) -> dict[str, object]:
    if write.change.kind != "reservation":
        return {}
    change: dict[str, object] = {}
    if write.needs_finalizer:
        change |= _finalizer_patch(cached)
    elif cached.has_finalizer:
        change["finalizers"] = _other_finalizers(cached)
    if write.change.is_archived != cached.is_archived:
        change["labels"] = _archive_labels(write.change) or _NO_ARCHIVE_LABELS
    return change


_NO_ARCHIVE_LABELS: Final = {objects.ARCHIVED_LABEL: None, objects.FINISHED_LABEL: None}


def _finalizer_patch(cached: CachedObject) -> dict[str, object]:
    if cached.has_finalizer or cached.is_being_deleted:
        return {}
    return {"finalizers": [*cached.finalizers, RESERVATION_FINALIZER]}


def _spec_patch(write: ObjectWrite, cached: CachedObject) -> Spec:
    """Of an object that a user made, only the target cluster: the rest of the spec is the user's."""
    wanted = write.projection.spec
    if cached.is_managed:
        if cached.spec == kubernetes_cache.canonical_spec(wanted):
            return {}
        has = kubernetes_cache.cached_spec(cached)
        return resources.merge_patch(has, projection.comparable_spec(wanted))
    target = wanted.get("targetClusterID")
    if target and kubernetes_cache.cached_spec(cached).get("targetClusterID") != target:
        return {"targetClusterID": target}
    return {}


def _archive_labels(change: RecordWrite) -> dict[str, str]:
    at = change.finished_at
    if at is None:
        return {}
    return {objects.ARCHIVED_LABEL: "true", objects.FINISHED_LABEL: hour_label(at)}


async def _remove_finalizer(
    cache: StoredObjectCache, key: ObjectKey, cached: CachedObject
) -> CachedObject:
    return await cache.patch(key, cached, {"metadata": {"finalizers": _other_finalizers(cached)}})


def _other_finalizers(cached: CachedObject) -> list[str]:
    return [name for name in cached.finalizers if name != RESERVATION_FINALIZER]
