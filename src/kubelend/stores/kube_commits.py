"""Computes the state of the head after a commit, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.core.journal import seal
from kubelend.core.models import Cluster, Reservation, ReservationId
from kubelend.stores import batches, kube_archive, kube_journal, kube_objects, kube_sights, records
from kubelend.stores.batches import Batch, Document
from kubelend.stores.kube_head import Changes, Mark, Sealed, State, Write
from kubelend.stores.kube_objects import RecordKind
from kubelend.stores.kube_sights import Sights


class Joining(NamedTuple):
    """The reservations that a commit archives, and the retention limit after it."""

    finishes: Mapping[ReservationId, datetime]
    kept_from: datetime | None


def joining(
    state: State, finishes: Mapping[ReservationId, datetime], archive_for: timedelta
) -> Joining:
    if not finishes:
        return Joining(finishes, state.kept_from)
    current = batches.kept_from(finishes.values(), archive_for)
    return Joining(finishes, max(current, state.kept_from or current))


def after(state: State, batch: Batch, revision: int, joins: Joining, sights: Sights) -> State:
    """The state after this commit, before the audit log is truncated."""
    sealed = [Sealed.of(line) for line in seal(batch.entries, state.end.head)]
    waiting, moved = kube_journal.waiting(state, sealed)
    last = sealed[-1] if sealed else None
    return replace(
        state,
        sequence=state.sequence + 1,
        revision=revision,
        end=Mark(last.number, last.digest) if last else state.end,
        lines=waiting,
        cut_from=state.start.number,
        kept_from=joins.kept_from,
        swept_until=state.swept_until or (joins.kept_from and kube_archive.begun(joins.kept_from)),
        changes=Changes(tuple(_writes(batch, joins, sights)), moved),
        elsewhere=(),
    )


def roll_changes(batch: Batch) -> dict[str, bool]:
    """By object name, whether reservations are unfinished after the commit."""
    changes = {one.id: one.finished_at is None for one in batch.reservations.values()}
    changes |= dict.fromkeys(batch.archived, False)
    return {kube_objects.name_of("reservation", one): is_on for one, is_on in changes.items()}


def _writes(batch: Batch, joins: Joining, sights: Sights) -> Iterator[Write]:
    for cluster, advertised in batch.clusters.items():
        yield from _write("cluster", cluster, advertised, sights)
    for reservation, found in batch.reservations.items():
        if reservation not in joins.finishes:
            yield from _write("reservation", reservation, found, sights)
    for deleted, finished_at in joins.finishes.items():
        yield from _archiving(deleted, batch.reservations.get(deleted), finished_at, joins, sights)
    for (kind, name), document in batch.documents.items():
        yield from _write(kind, name, document, sights)


def _archiving(
    id: ReservationId,
    found: Reservation | None,
    finished_at: datetime,
    joins: Joining,
    sights: Sights,
) -> Iterator[Write]:
    """A reservation older than the retention limit is deleted at once."""
    if joins.kept_from is not None and finished_at < joins.kept_from:
        yield Write("reservation", id)
    elif found is None:
        yield Write("reservation", id, finished_at=finished_at)
    else:
        for write in _write("reservation", id, found, sights):
            yield replace(write, finished_at=finished_at)


def _write(
    kind: RecordKind, id: str, found: Cluster | Reservation | Document | None, sights: Sights
) -> Iterator[Write]:
    if found is not None:
        _, _, text = records.encode(found)
        write = Write(kind, id, msgspec.Raw(text))
        yield replace(write, was_there=sights.knows(kube_sights.key_of(write)))
    elif _is_text(id):
        yield Write(kind, id)


def _is_text(id: str) -> bool:
    """An ID with surrogates was never stored, so there is nothing to delete."""
    try:
        id.encode()
    except UnicodeEncodeError:
        return False
    return True
