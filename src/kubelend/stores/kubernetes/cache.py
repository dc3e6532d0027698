"""Cache of the objects that the Kubernetes store has read or written, so that it can write without a read.

A write is conditional on the cached version. After a conflict the object is read and evaluated again: the
cache saves a call, and never decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from kubelend.core.errors import Conflict, NotFound, StoreFailed
from kubelend.kube import codec
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes import objects, projection
from kubelend.stores.kubernetes.head import RecordWrite
from kubelend.stores.kubernetes.objects import (
    LEDGER_RECORDS,
    STORED_ADVERTISEMENTS,
    STORED_RESERVATIONS,
    AnyStoredObject,
    RecordKind,
    Spec,
)
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, LedgerRecord, StoredRecord

ObjectKey = tuple[RecordKind, str]
"""A record's kind and the name of its object."""


NO_RECORD: Final = StoredRecord(0, "", "")
"""The record of a placeholder."""

CORRUPT: Final = -1
"""Older than any commit, whatever revision the object claims."""


class StaleWrite(Exception):
    """Another client has written, created or deleted the object since it was read."""


class CachedObject(NamedTuple):
    """What the next write of an object depends on."""

    version: str
    sequence: int
    """Of the commit that wrote its record; 0 for none, and `CORRUPT` if the checksum is wrong."""
    is_managed: bool
    """Whether the broker created it."""
    is_being_deleted: bool
    """Whether it has a deletionTimestamp and waits for its finalizers."""
    is_archived: bool
    finalizers: tuple[str, ...]
    spec: bytes
    finished_at: datetime | None = None
    uid: str = ""

    @property
    def is_unadopted(self) -> bool:
        """Whether a user made it, and the broker has not processed it yet."""
        return not self.sequence and not self.is_managed

    @property
    def has_finalizer(self) -> bool:
        return RESERVATION_FINALIZER in self.finalizers


class StoredObjectCache:
    """Reads and caches the objects of one namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self.is_closed = False
        """Whether no further write may begin."""
        self._cached: dict[ObjectKey, CachedObject] = {}

    async def get(self, key: ObjectKey) -> CachedObject | None:
        """The cached object, or else the current one; None if it does not exist."""
        return self.cached(key) or await self.refresh(key)

    def cached(self, key: ObjectKey) -> CachedObject | None:
        return self._cached.get(key)

    async def refresh(self, key: ObjectKey) -> CachedObject | None:
        found = await self.client.find(resource_for(key[0]), key[1], self.namespace)
        if found is None:
            self.forget(key)
            return None
        return self.put(key[0], found)

    def put(
        self, kind: RecordKind, found: AnyStoredObject, finished_at: datetime | None = None
    ) -> CachedObject:
        """Cache an object; of a reservation also when it finished."""
        metadata = found.metadata
        cached = CachedObject(
            metadata.resource_version,
            _sequence(kind, found),
            metadata.labels.get(objects.MANAGED_BY) == objects.MANAGED_BY_BROKER,
            metadata.deletion_timestamp is not None,
            metadata.labels.get(objects.ARCHIVED_LABEL) == "true",
            metadata.finalizers,
            b"{}" if isinstance(found, LedgerRecord) else canonical_spec(found.spec),
            finished_at,
            metadata.uid,
        )
        key = kind, metadata.name
        if cached.is_unadopted:
            # Its user may delete it and make another one, which is another request.
            self.forget(key)
        else:
            self._cached[key] = cached
        return cached

    async def create(self, key: ObjectKey, placeholder: AnyStoredObject) -> CachedObject:
        with self._translate_errors():
            made = await self.client.create(resource_for(key[0]), placeholder)
        return self.put(key[0], made)

    async def patch(
        self,
        key: ObjectKey,
        cached: CachedObject,
        change: Mapping[str, Mapping[str, object]],
        *,
        subresource: str = "",
        finished_at: datetime | None = None,
    ) -> CachedObject:
        kind, name = key
        metadata = {**change.get("metadata", {}), "resourceVersion": cached.version}
        whole = {**change, "metadata": metadata}
        with self._translate_errors(deleted=True):
            found = await self.client.patch(
                resource_for(kind), name, self.namespace, whole, subresource=subresource
            )
        return self.put(kind, found, finished_at or cached.finished_at)

    async def delete(self, key: ObjectKey, cached: CachedObject) -> None:
        kind, name = key
        path = resource_for(kind).path(self.namespace, name)
        only = {"preconditions": {"resourceVersion": cached.version}}
        with self._translate_errors(deleted=True):
            await self.client.raw("DELETE", path, only)
        self.forget(key)

    @contextmanager
    def _translate_errors(self, *, deleted: bool = False) -> Iterator[None]:
        """Raises `StaleWrite` after a conflict, and with `deleted` if the object does not exist."""
        if self.is_closed:
            raise StoreFailed("the store is closed")
        try:
            yield
        except Conflict as error:
            raise StaleWrite from error
        except NotFound as error:
            if deleted and codec.is_object_not_found(error):
                raise StaleWrite from error
            raise

    def forget(self, key: ObjectKey) -> None:
        self._cached.pop(key, None)

    def finished_at(self, id: str) -> datetime | None:
        """When a reservation finished, if that is cached."""
        cached = self._cached.get(("reservation", objects.record_object_name("reservation", id)))
        return cached and cached.finished_at


def _sequence(kind: RecordKind, found: AnyStoredObject) -> int:
    record = found.record
    if record is None or record == NO_RECORD:
        return 0
    is_whole = objects.has_valid_checksum(kind, found.metadata.name, record)
    return record.revision if is_whole else CORRUPT


def object_key(write: RecordWrite) -> ObjectKey:
    return write.kind, objects.record_object_name(write.kind, write.id)


def resource_for(kind: str) -> Resource[Any]:
    return _RESOURCES.get(kind, LEDGER_RECORDS)


_RESOURCES: Final = {"cluster": STORED_ADVERTISEMENTS, "reservation": STORED_RESERVATIONS}


def canonical_spec(spec: Spec) -> bytes:
    """Equal for equal specs, ignoring the fields that the controllers write."""
    return _encode_sorted(projection.comparable_spec(spec))


def cached_spec(cached: CachedObject) -> Spec:
    return _SPEC_DECODER.decode(cached.spec)


_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_SPEC_DECODER: Final = msgspec.json.Decoder(Spec)
