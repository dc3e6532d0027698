"""Loads the working set from Kubernetes objects and the last commits, and sweeps the archive.

Objects without a record are skipped: users made them, and the controllers handle them. A deleted object is
deleted: who removes a reservation and its finalizer wants it released, and a missing cluster advertises
again. Reservations name their provider, so with an advertisement nothing is lost but its cordon. A wiped
status, as after a restore without statuses, therefore counts as a deleted advertisement; a reservation
without its record may hold resources, so it is an error.

A reservation whose whole status was wiped looks like a placeholder that never got its record. The head has
the number of unfinished reservations: if some are missing and there are such objects, it is an error, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from kubelend.core.errors import Gone
from kubelend.core.events import WorkingSet
from kubelend.core.models import Reservation
from kubelend.kits import tasks
from kubelend.stores.batch import CorruptRecord
from kubelend.stores.kubernetes import cache as kubernetes_cache
from kubelend.stores.kubernetes import head as kubernetes_head
from kubelend.stores.kubernetes import projection, writer
from kubelend.stores.kubernetes.cache import (
    NO_RECORD,
    CachedObject,
    ObjectKey,
    StaleWrite,
    StoredObjectCache,
)
from kubelend.stores.kubernetes.head import HeadRecord, HeadState, PendingWrite
from kubelend.stores.kubernetes.objects import (
    ARCHIVED_LABEL,
    CONTENTS_LABEL,
    FINISHED_LABEL,
    STORED_RESERVATIONS,
    AnyStoredObject,
    RecordKind,
    StoredObject,
)

RecordsByKey = dict[ObjectKey, Any]
"""Records by kind and object name."""


class LoadedObjects(NamedTuple):
    records: RecordsByKey
    placeholders: list[tuple[ObjectKey, CachedObject]]
    """Placeholders that never got a record, and advertisements whose record was removed."""
    without_record: set[ObjectKey]
    """Those advertisements among them that are known to have had a record."""
    held_without_record: list[ObjectKey]
    """Reservations with the finalizer, of users too: placeholders, or their status was wiped."""


async def load_objects(cache: StoredObjectCache, state: HeadState, at: str = "") -> LoadedObjects:
    """All but the archive and the audit log, with the changes of the last commits.

    `at`: the version to read at, if a broker may write meanwhile.
    """
    found = LoadedObjects({}, [], set(), [])

    async def list_kind(kind: str, labels: str = "") -> list[Any]:
        resource = kubernetes_cache.resource_for(kind)
        listed = await cache.client.list(resource, cache.namespace, labels=labels, at=at)
        for one in listed.undecodable:
            raise CorruptRecord(f"{object_title(kind, one.name)}: {one.error}")
        return listed.objects

    for one in await list_kind("cluster"):
        _load_object(found, cache, "cluster", one)
    for one in await list_kind("reservation", f"{ARCHIVED_LABEL}!=true"):
        _load_object(found, cache, "reservation", one)
    for one in await list_kind("document", f"{CONTENTS_LABEL} notin (head, pending, audit-log)"):
        if one.contents in projection.RECORD_DECODERS:
            _load_object(found, cache, one.contents, one)
    apply_pending(found.records, kubernetes_head.pending_writes(state.pending))
    if len(unfinished_reservations(found.records)) < state.unfinished:
        _check_missing_records(found)
    return found


async def snapshot(head: HeadRecord, cache: StoredObjectCache) -> tuple[WorkingSet, int]:
    """The working set as of one commit, and its number. Writes nothing; a broker may write meanwhile.

    Everything is read at one version. Versions count all kinds of a server together, so it is a consistent
    snapshot.
    """
    for _ in range(kubernetes_head.MAX_READ_ATTEMPTS):
        with suppress(Gone):
            at = await head.read()
            state = head.state
            found = await load_objects(cache, state, at)
            return working_set(found.records, state.revision), state.sequence
    raise kubernetes_head.version_compacted_error()


def apply_pending(records: RecordsByKey, pending: Iterable[PendingWrite]) -> None:
    """Apply the changes that may not be in the objects."""
    for _, write in pending:
        key = kubernetes_cache.object_key(write)
        if not write.text or write.is_archived:
            records.pop(key, None)
            continue
        record = projection.decode_record_text(write.kind, write.text)
        is_over = isinstance(record, Reservation) and record.finished_at is not None
        if key in records or not (is_over and write.existed_before):  # else its user has deleted it
            records[key] = record


def unfinished_reservations(records: RecordsByKey) -> set[str]:
    """The names of their objects."""
    return {
        name
        for (_, name), record in records.items()
        if isinstance(record, Reservation) and record.finished_at is None
    }


def working_set(records: RecordsByKey, revision: int) -> WorkingSet:
    by_kind: dict[RecordKind, list[Any]] = {kind: [] for kind in projection.RECORD_DECODERS}
    for (kind, _), record in records.items():
        by_kind[kind].append(record)
    documents = by_kind["member"], by_kind["token"], by_kind["limits"]
    return WorkingSet(by_kind["cluster"], by_kind["reservation"], revision, *documents)


def abandoned_placeholders(
    found: LoadedObjects, state: HeadState
) -> list[tuple[ObjectKey, CachedObject]]:
    """Placeholders that no commit will complete: their broker was stopped, or replaced by another leader."""
    pending = {
        kubernetes_cache.object_key(write) for commit in state.pending for write in commit.writes
    }
    return [(key, cached) for key, cached in found.placeholders if key not in pending]


def decode_stored_record(kind: RecordKind, found: AnyStoredObject) -> Any:
    """Its record; `CorruptRecord` names the object."""
    try:
        return projection.verified_record(kind, found)
    except CorruptRecord as error:
        raise CorruptRecord(f"{object_title(kind, found.metadata.name)}: {error}") from error


def object_title(kind: str, name: str) -> str:
    """Kind and name of the object, for messages."""
    return f"{kubernetes_cache.resource_for(kind).kind} {name}"


def _load_object(
    found: LoadedObjects, cache: StoredObjectCache, kind: RecordKind, one: AnyStoredObject
) -> None:
    key = (kind, one.metadata.name)
    if isinstance(one, StoredObject) and one.lost_record and kind == "reservation":
        raise CorruptRecord(f"{object_title(*key)}: its record was removed from the status")
    if one.record is None or one.record == NO_RECORD:
        cached = cache.put(kind, one)
        if cached.is_managed:
            found.placeholders.append((key, cached))
        if cached.has_finalizer:
            found.held_without_record.append(key)
        if isinstance(one, StoredObject) and kind == "cluster" and one.had_record:
            found.without_record.add(key)
        return
    read = found.records[key] = decode_stored_record(kind, one)
    cache.put(kind, one, getattr(read, "finished_at", None))


def _check_missing_records(found: LoadedObjects) -> None:
    """A deleted object counts as released. One with the finalizer but without a record is an error."""
    for key in found.held_without_record:
        if key not in found.records:
            raise CorruptRecord(
                f"{object_title(*key)}: its status was cleared;"
                " to release what it held, delete it and its finalizer"
            )


ONE_HOUR: Final = timedelta(hours=1)
MAX_SELECTED_HOURS: Final = 48
"""Above this many hours the selector does not list them."""


def start_of_hour(at: datetime) -> datetime:
    """The start of the hour of a timestamp."""
    return at.replace(minute=0, second=0, microsecond=0)


async def sweep_archive(cache: StoredObjectCache, state: HeadState) -> datetime | None:
    """Delete expired archived objects; returns up to when nothing is left."""
    since, until = state.swept_until, state.kept_from and start_of_hour(state.kept_from)
    if since is None or until is None or since >= until:
        return since
    labels = _archive_selector(since, until)
    listed = await cache.client.list(STORED_RESERVATIONS, cache.namespace, labels=labels)
    old = [found for found in listed.objects if _is_expired(found, until)]

    async def delete(found: StoredObject) -> None:
        key: ObjectKey = ("reservation", found.metadata.name)
        with suppress(StaleWrite):  # changed or deleted by others
            await writer.delete_object(cache, key, cache.put("reservation", found))
        cache.forget(key)

    await tasks.gather_limited(delete, old)
    return until


def _is_expired(found: StoredObject, until: datetime) -> bool:
    try:
        record: Reservation = projection.verified_record("reservation", found)
    except CorruptRecord:
        return False  # its finish time is unknown
    return record.finished_at is not None and record.finished_at < until


def _archive_selector(since: datetime, until: datetime) -> str:
    count = int((until - since) / ONE_HOUR)
    if count > MAX_SELECTED_HOURS:
        return f"{ARCHIVED_LABEL}=true"
    hours = ",".join(writer.hour_label(since + number * ONE_HOUR) for number in range(count))
    return f"{ARCHIVED_LABEL}=true,{FINISHED_LABEL} in ({hours})"
