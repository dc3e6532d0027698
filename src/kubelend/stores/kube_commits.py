"""Computes the state of the head after a commit, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.core.journal import chain_entries
from kubelend.core.models import Cluster, Reservation, ReservationId
from kubelend.stores import batches, kube_archive, kube_journal, kube_objects, kube_sights, records
from kubelend.stores.batches import Document, WriteBatch
from kubelend.stores.kube_head import (
    AuditPosition,
    ChainedLine,
    CommitChanges,
    HeadState,
    RecordWrite,
)
from kubelend.stores.kube_objects import RecordKind
from kubelend.stores.kube_sights import ObjectCache


class Archiving(NamedTuple):
    """The reservations that a commit archives, and the retention limit after it."""

    finish_times: Mapping[ReservationId, datetime]
    retention_limit: datetime | None


def plan_archiving(
    state: HeadState, finish_times: Mapping[ReservationId, datetime], archive_for: timedelta
) -> Archiving:
    if not finish_times:
        return Archiving(finish_times, state.kept_from)
    current = batches.compute_retention_limit(finish_times.values(), archive_for)
    return Archiving(finish_times, max(current, state.kept_from or current))


def state_after(
    state: HeadState, batch: WriteBatch, revision: int, archiving: Archiving, cache: ObjectCache
) -> HeadState:
    """The state after this commit, before the audit log is truncated."""
    sealed = [ChainedLine.of(line) for line in chain_entries(batch.audit_records, state.end.head)]
    waiting, moved = kube_journal.split_log_tail(state, sealed)
    last = sealed[-1] if sealed else None
    return replace(
        state,
        sequence=state.sequence + 1,
        revision=revision,
        end=AuditPosition(last.number, last.digest) if last else state.end,
        lines=waiting,
        cut_from=state.start.number,
        kept_from=archiving.retention_limit,
        swept_until=state.swept_until
        or (archiving.retention_limit and kube_archive.start_of_hour(archiving.retention_limit)),
        changes=CommitChanges(tuple(_record_writes(batch, archiving, cache)), moved),
        elsewhere=(),
    )


def live_set_changes(batch: WriteBatch) -> dict[str, bool]:
    """By object name, whether reservations are unfinished after the commit."""
    changes = {one.id: one.finished_at is None for one in batch.reservations.values()}
    changes |= dict.fromkeys(batch.archived, False)
    return {
        kube_objects.record_object_name("reservation", one): is_on for one, is_on in changes.items()
    }


def _record_writes(
    batch: WriteBatch, archiving: Archiving, cache: ObjectCache
) -> Iterator[RecordWrite]:
    for cluster, advertised in batch.clusters.items():
        yield from _record_write("cluster", cluster, advertised, cache)
    for reservation, found in batch.reservations.items():
        if reservation not in archiving.finish_times:
            yield from _record_write("reservation", reservation, found, cache)
    for deleted, finished_at in archiving.finish_times.items():
        yield from _archive_writes(
            deleted, batch.reservations.get(deleted), finished_at, archiving, cache
        )
    for (kind, name), document in batch.documents.items():
        yield from _record_write(kind, name, document, cache)


def _archive_writes(
    id: ReservationId,
    found: Reservation | None,
    finished_at: datetime,
    archiving: Archiving,
    cache: ObjectCache,
) -> Iterator[RecordWrite]:
    """A reservation older than the retention limit is deleted at once."""
    if archiving.retention_limit is not None and finished_at < archiving.retention_limit:
        yield RecordWrite("reservation", id)
    elif found is None:
        yield RecordWrite("reservation", id, finished_at=finished_at)
    else:
        for write in _record_write("reservation", id, found, cache):
            yield replace(write, finished_at=finished_at)


def _record_write(
    kind: RecordKind, id: str, found: Cluster | Reservation | Document | None, cache: ObjectCache
) -> Iterator[RecordWrite]:
    if found is not None:
        _, _, text = records.encode_record(found)
        write = RecordWrite(kind, id, msgspec.Raw(text))
        yield replace(write, existed_before=cache.is_cached(kube_sights.object_key(write)))
    elif _is_encodable(id):
        yield RecordWrite(kind, id)


def _is_encodable(id: str) -> bool:
    """An ID with surrogates was never stored, so there is nothing to delete."""
    try:
        id.encode()
    except UnicodeEncodeError:
        return False
    return True
