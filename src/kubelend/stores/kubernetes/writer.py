"""Applies committed changes to Kubernetes objects. Idempotent.

The commit is durable in the head before. An object that has the record of this commit or of a later one is
not touched, and every write is conditional on the version that was read. So an interrupted apply can start
again, and a broker that was suspended cannot undo the writes of its successor.

Objects are created as placeholders, and get their record only if the head is still this store's own:
otherwise an object that the successor has deleted meanwhile would come back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from kubelend.core.errors import InvalidInput, StoreFailed
from kubelend.core.models import Reservation
from kubelend.kits import tasks
from kubelend.kube import resources
from kubelend.stores.kubernetes import cache as kubernetes_cache
from kubelend.stores.kubernetes import objects, projection
from kubelend.stores.kubernetes.cache import (
    NO_RECORD,
    CachedObject,
    ObjectCache,
    ObjectKey,
    StaleWrite,
)
from kubelend.stores.kubernetes.head import RecordWrite
from kubelend.stores.kubernetes.objects import AnyStoredObject, Spec, StoredObject
from kubelend.stores.kubernetes.projection import Projection
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, LedgerRecord, StoredRecord
from kubelend.wire.objects import Metadata

MAX_WRITE_ATTEMPTS: Final = 50
"""How often a write is tried again that conflicts with writes of others."""

FencingCheck = Callable[[], Awaitable[None]]
"""Raises `StoreFailed` if the head is not this store's own any more."""


async def apply_writes(
    cache: ObjectCache, writes: Iterable[RecordWrite], sequence: int, check_fencing: FencingCheck
) -> None:
    """Bring the objects into agreement with these writes."""
    object_writes = [_object_write(write, sequence, cache.signature_key) for write in writes]
    work = ObjectApplier(cache, check_fencing)
    # Releases first: the objects must never show more reserved than there is.
    for takes in (False, True):
        await work.apply(
            [object_write for object_write in object_writes if object_write.takes_capacity is takes]
        )


async def delete_object(cache: ObjectCache, key: ObjectKey, cached: CachedObject) -> None:
    """Delete an object as it was read; `StaleWrite` if it has changed."""
    if cached.has_finalizer:
        cached = await _remove_finalizer(cache, key, cached)
    await cache.delete(key, cached)


async def unarchive(cache: ObjectCache, key: ObjectKey) -> None:
    """Remove the archive labels from an unfinished reservation, and add the finalizer again."""
    for _ in range(MAX_WRITE_ATTEMPTS):
        cached = await cache.get(key)
        if cached is None or not cached.is_archived:
            return
        try:
            await cache.patch(key, cached, {"metadata": _unarchive_patch(cached)})
        except StaleWrite:
            cache.forget(key)
        else:
            return
    raise _too_many_conflicts(key)


def hour_label(at: datetime) -> str:
    """As in the label of archived reservations."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H}"


class ObjectWrite(NamedTuple):
    """A write, with all that does not depend on the object."""

    write: RecordWrite
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
    def has_record(self) -> bool:
        return bool(self.record.data)

    @property
    def stays_deleted(self) -> bool:
        """Whether a missing object is not created again, because its user has deleted it."""
        return bool(self.request_uid) or (self.is_finished and self.write.existed_before)

    @property
    def needs_finalizer(self) -> bool:
        """Whether the object needs the finalizer."""
        return self.write.kind == "reservation" and not self.write.is_archived


def _object_write(write: RecordWrite, sequence: int, signature_key: str) -> ObjectWrite:
    key = kubernetes_cache.object_key(write)
    if not write.text:
        nothing = projection.EMPTY_PROJECTION
        return ObjectWrite(
            write, key, sequence, nothing, NO_RECORD, takes_capacity=False, is_finished=True
        )
    record = projection.decode_record_text(write.kind, write.text)
    stored = projection.stored_record(signature_key, write.kind, write.id, write.text, sequence)
    is_over = isinstance(record, Reservation) and record.finished_at is not None
    takes = isinstance(record, Reservation) and record.is_live
    uid = objects.requesting_uid(record) if isinstance(record, Reservation) else ""
    return ObjectWrite(
        write, key, sequence, projection.project(record), stored, takes, is_over, uid
    )


class ObjectApplier:
    """Carries out writes concurrently."""

    def __init__(self, cache: ObjectCache, check: FencingCheck) -> None:
        self._cache = cache
        self._check_fencing = check

    async def apply(self, writes: list[ObjectWrite]) -> None:
        puts = [object_write for object_write in writes if object_write.has_record]
        await tasks.gather_limited(
            self._delete_or_archive,
            [object_write for object_write in writes if not object_write.has_record],
        )
        prepared = await tasks.gather_limited(self._prepare, puts)
        if any(_has_no_record(cached) for cached in prepared):
            await self._check_fencing()  # once for all: it is a call
        both = list(zip(puts, prepared, strict=True))
        done = await tasks.gather_limited(lambda pair: self._write_record(*pair), both)
        await tasks.gather_limited(
            self._apply_alone,
            [object_write for object_write, is_done in zip(puts, done, strict=True) if not is_done],
        )

    async def _apply_alone(self, object_write: ObjectWrite) -> None:
        """One with concurrent writes by others."""
        for _ in range(MAX_WRITE_ATTEMPTS):
            cached = await self._prepare_existing(
                object_write, await self._cache.refresh(object_write.key)
            )
            if _has_no_record(cached):
                await self._check_fencing()
            if await self._write_record(object_write, cached):
                return
        raise _too_many_conflicts(object_write.key)

    async def _prepare(self, object_write: ObjectWrite) -> CachedObject | None:
        """The object, created if needed, with the right spec; None if it has this record or a newer one.

        An unknown object is usually new. It is created without a read: the server reports a conflict.
        """
        cached = self._cache.cached(object_write.key)
        if cached is None and object_write.stays_deleted:
            cached = await self._cache.refresh(object_write.key)
        return await self._prepare_existing(object_write, cached)

    async def _prepare_existing(
        self, object_write: ObjectWrite, cached: CachedObject | None
    ) -> CachedObject | None:
        for _ in range(MAX_WRITE_ATTEMPTS):
            try:
                if cached is None:
                    return None if object_write.stays_deleted else await self._create(object_write)
                if _is_other_request(object_write, cached):
                    return None
                if cached.sequence < object_write.sequence:
                    return await self._correct(object_write, cached)
                await self._remove_finalizer_if_finished(object_write, cached)
            except StaleWrite:
                cached = await self._cache.refresh(object_write.key)
            else:
                return None
        raise _too_many_conflicts(object_write.key)

    async def _create(self, object_write: ObjectWrite) -> CachedObject:
        try:
            placeholder = _placeholder(
                object_write, object_write.projection.spec, self._cache.namespace
            )
            return await self._cache.create(object_write.key, placeholder)
        except InvalidInput:
            spec = projection.minimal(object_write.projection).spec
            placeholder = _placeholder(object_write, spec, self._cache.namespace)
            return await self._cache.create(object_write.key, placeholder)

    async def _correct(self, object_write: ObjectWrite, cached: CachedObject) -> CachedObject:
        """Correct edits, and apply changes, outside of the status."""
        metadata, spec = _metadata_patch(object_write, cached), _spec_patch(object_write, cached)
        if spec:
            try:
                change = {"metadata": metadata, "spec": spec}
                return await self._cache.patch(object_write.key, cached, change)
            except InvalidInput:
                pass  # the spec is informative; the record follows
        if metadata:
            return await self._cache.patch(object_write.key, cached, {"metadata": metadata})
        return cached

    async def _write_record(self, object_write: ObjectWrite, cached: CachedObject | None) -> bool:
        """Write the record, which makes it valid; False after a conflict."""
        try:
            if cached is not None:
                await self._remove_finalizer_if_finished(
                    object_write, await self._patch_record(object_write, cached)
                )
        except StaleWrite:
            return False
        return True

    async def _patch_record(self, object_write: ObjectWrite, cached: CachedObject) -> CachedObject:
        key, finished_at = object_write.key, object_write.projection.finished_at
        if not object_write.projection.status:
            return await self._cache.patch(
                key, cached, {"record": _record_fields(object_write.record)}
            )
        try:
            change = {
                "status": {
                    **object_write.projection.status,
                    "record": _record_fields(object_write.record),
                }
            }
            return await self._cache.patch(
                key, cached, change, subresource="status", finished_at=finished_at
            )
        except InvalidInput:
            status = projection.minimal(object_write.projection).status
            change = {"status": {**status, "record": _record_fields(object_write.record)}}
            return await self._cache.patch(
                key, cached, change, subresource="status", finished_at=finished_at
            )

    async def _remove_finalizer_if_finished(
        self, object_write: ObjectWrite, cached: CachedObject
    ) -> None:
        """The finalizer of a finished reservation that its user has deleted is removed."""
        if object_write.is_finished and cached.is_being_deleted and cached.has_finalizer:
            await _remove_finalizer(self._cache, object_write.key, cached)

    async def _delete_or_archive(self, object_write: ObjectWrite) -> None:
        """Delete an object, or archive it."""
        cached = await self._cache.get(object_write.key)
        for _ in range(MAX_WRITE_ATTEMPTS):
            if (
                cached is None
                or cached.sequence > object_write.sequence
                or _is_other_request(object_write, cached)
            ):
                return
            try:
                await self._delete_or_archive_existing(object_write, cached)
            except StaleWrite:
                cached = await self._cache.refresh(object_write.key)
            else:
                return
        raise _too_many_conflicts(object_write.key)

    async def _delete_or_archive_existing(
        self, object_write: ObjectWrite, cached: CachedObject
    ) -> None:
        if not object_write.write.is_archived:
            if not cached.is_unadopted:
                await delete_object(self._cache, object_write.key, cached)
        elif metadata := _metadata_patch(object_write, cached):
            await self._cache.patch(object_write.key, cached, {"metadata": metadata})
        self._cache.forget(object_write.key)


def _is_other_request(object_write: ObjectWrite, cached: CachedObject) -> bool:
    """Whether the reservation's object was deleted, and another one of its name created since."""
    return (
        object_write.write.kind == "reservation"
        and cached.is_unadopted
        and cached.uid != object_write.request_uid
    )


def _has_no_record(cached: CachedObject | None) -> bool:
    """Whether it has no valid record: then only the head determines who may write one."""
    return cached is not None and cached.sequence <= 0


def _placeholder(object_write: ObjectWrite, spec: Spec, namespace: str) -> AnyStoredObject:
    write, (_, name) = object_write.write, object_write.key
    if write.kind not in {"cluster", "reservation"}:
        metadata = Metadata(name, namespace, labels=objects.ledger_record_labels(write.kind))
        return LedgerRecord(metadata, write.kind, NO_RECORD)
    labels = {objects.MANAGED_BY: objects.MANAGED_BY_BROKER, **_archive_labels(write)}
    finalizers = (RESERVATION_FINALIZER,) if object_write.needs_finalizer else ()
    return StoredObject(Metadata(name, namespace, finalizers=finalizers, labels=labels), spec)


def _metadata_patch(object_write: ObjectWrite, cached: CachedObject) -> dict[str, object]:
    if object_write.write.kind != "reservation":
        return {}
    change: dict[str, object] = {}
    if object_write.needs_finalizer:
        change |= _finalizer_patch(cached)
    elif cached.has_finalizer:
        change["finalizers"] = _other_finalizers(cached)
    if object_write.write.is_archived != cached.is_archived:
        change["labels"] = _archive_labels(object_write.write) or _NO_ARCHIVE_LABELS
    return change


_NO_ARCHIVE_LABELS: Final = {objects.ARCHIVED_LABEL: None, objects.FINISHED_LABEL: None}


def _unarchive_patch(cached: CachedObject) -> dict[str, object]:
    return {"labels": _NO_ARCHIVE_LABELS, **_finalizer_patch(cached)}


def _finalizer_patch(cached: CachedObject) -> dict[str, object]:
    if cached.has_finalizer or cached.is_being_deleted:
        return {}
    return {"finalizers": [*cached.finalizers, RESERVATION_FINALIZER]}


def _spec_patch(object_write: ObjectWrite, cached: CachedObject) -> Spec:
    """Of an object that a user made, only the target cluster: the rest of the spec is the user's."""
    wanted = object_write.projection.spec
    if cached.is_managed:
        if cached.spec == kubernetes_cache.canonical_spec(wanted):
            return {}
        has = kubernetes_cache.cached_spec(cached)
        return resources.merge_patch(has, projection.comparable_spec(wanted))
    target = wanted.get("targetClusterID")
    if target and kubernetes_cache.cached_spec(cached).get("targetClusterID") != target:
        return {"targetClusterID": target}
    return {}


def _archive_labels(write: RecordWrite) -> dict[str, str]:
    if write.finished_at is None:
        return {}
    return {
        objects.ARCHIVED_LABEL: "true",
        objects.FINISHED_LABEL: hour_label(write.finished_at),
    }


async def _remove_finalizer(
    cache: ObjectCache, key: ObjectKey, cached: CachedObject
) -> CachedObject:
    return await cache.patch(key, cached, {"metadata": {"finalizers": _other_finalizers(cached)}})


def _other_finalizers(cached: CachedObject) -> list[str]:
    return [name for name in cached.finalizers if name != RESERVATION_FINALIZER]


def _record_fields(record: StoredRecord) -> dict[str, object]:
    return {"revision": record.revision, "checksum": record.checksum, "data": record.data}


def _too_many_conflicts(key: ObjectKey) -> StoreFailed:
    kind, name = key
    return StoreFailed(
        f"{kubernetes_cache.resource_for(kind)} {name}: too many conflicting writes by others",
        hint="find the other writer with `kubectl get --show-managed-fields`",
    )
