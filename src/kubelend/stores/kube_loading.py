"""Loads the working set from Kubernetes objects and the last commit, and sweeps the archive.

Objects without a record are skipped: users made them, and the controllers handle them. A deleted object is
deleted: who removes a reservation and its finalizer wants it released, and a missing cluster advertises
again. Reservations name their provider, so with an advertisement nothing is lost but its cordon. A wiped
status, as after a restore without statuses, therefore counts as a deleted advertisement; a reservation
without its record may hold resources, so it is an error.

Archived reservations have a label, which others may write, too. The head has a digest of all unfinished
reservations. If that of the loaded ones differs, the archive is read as well: a deleted object explains the
difference, and a wrongly labelled one is restored.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from kubelend.core.errors import Gone
from kubelend.core.models import Reservation
from kubelend.core.records import Records
from kubelend.kube.client import Listing
from kubelend.stores import kube_projection, kube_sights
from kubelend.stores.kube_head import State, Write
from kubelend.stores.kube_keeping import MOST_READS, Keeper, forgetful
from kubelend.stores.kube_objects import (
    ADVERTISEMENTS,
    ARCHIVED,
    HOLDS,
    LEDGER,
    RESERVATIONS,
    RecordKind,
    Seen,
    Stored,
)
from kubelend.stores.kube_seals import Roll
from kubelend.stores.kube_sights import BLANK, Key, Sight, Sights
from kubelend.stores.records import Damaged
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, LedgerRecord

Named = dict[Key, Any]
"""Records by kind and object name."""


class Found(NamedTuple):
    records: Named
    blanks: list[tuple[Key, Sight]]
    """Placeholders that never got a record, and advertisements whose record was removed."""
    robbed: set[Key]
    """Those advertisements among them that are known to have had a record."""
    astray: list[Key]
    """Unfinished reservations with the archive label."""


async def read(sights: Sights, state: State, at: str = "") -> Found:
    """All but the archive and the audit log, with the changes of the last commit.

    `at`: the version to read at, if a broker may write meanwhile.
    """
    found, client, namespace = Found({}, [], set(), []), sights.client, sights.namespace
    _take_all(found, sights, "cluster", await client.list(ADVERTISEMENTS, namespace, at=at))
    unarchived = f"{ARCHIVED}!=true"
    reservations = await client.list(RESERVATIONS, namespace, labels=unarchived, at=at)
    _take_all(found, sights, "reservation", reservations)
    others = f"{HOLDS} notin (head, pending, audit-log)"
    _take_documents(found, sights, await client.list(LEDGER, namespace, labels=others, at=at))
    overlay(found.records, state.changes.writes)
    if roll(found.records, state.key).digest != state.unfinished:
        listed = await client.list(RESERVATIONS, namespace, at=at)
        _take_back(found, sights, listed)
        overlay(found.records, state.changes.writes)
        _check_missing(found, listed, state)
    return found


async def look(keeper: Keeper, sights: Sights) -> tuple[Records, int]:
    """The working set as of one commit, and its number. Writes nothing; a broker may write meanwhile.

    Everything is read at one version. Versions count all kinds of a server together, so it is a consistent
    snapshot.
    """
    for _ in range(MOST_READS):
        with suppress(Gone):
            at = await keeper.read()
            state = keeper.state
            found = await read(sights, state, at)
            return arranged(found.records, state.revision), state.sequence
    raise forgetful()


def overlay(records: Named, writes: Iterable[Write]) -> None:
    """Apply the changes of the last commit."""
    for write in writes:
        key = kube_sights.key_of(write)
        if not write.text or write.is_archived:
            records.pop(key, None)
            continue
        record = kube_projection.read(write.kind, write.text)
        is_over = isinstance(record, Reservation) and record.finished_at is not None
        if key in records or not (is_over and write.was_there):  # else its user has deleted it
            records[key] = record


def roll(records: Named, key: str) -> Roll:
    """Of the unfinished reservations."""
    return Roll(key, (name for (_, name), record in records.items() if _is_unfinished(record)))


def arranged(records: Named, revision: int) -> Records:
    by_kind: dict[RecordKind, list[Any]] = {kind: [] for kind in kube_projection.DECODERS}
    for (kind, _), record in records.items():
        by_kind[kind].append(record)
    return Records(
        by_kind["cluster"],
        by_kind["reservation"],
        revision,
        by_kind["member"],
        by_kind["token"],
        by_kind["limits"],
    )


def unfinished(found: Found, state: State) -> list[tuple[Key, Sight]]:
    """Placeholders that no commit will complete: their broker was stopped, or replaced by another leader."""
    pending = {kube_sights.key_of(write) for write in state.changes.writes}
    return [(key, cached) for key, cached in found.blanks if key not in pending]


def misplaced(found: Found, state: State) -> list[Key]:
    """Unfinished reservations that have the archive label, or may have it.

    Those of the last commit are taken from the head, whatever their labels.
    """
    pending = (kube_sights.key_of(write) for write in state.changes.writes)
    return [*found.astray, *(key for key in pending if _is_unfinished(found.records.get(key)))]


def record(kind: RecordKind, found: Seen, key: str) -> Any:
    """Its record; `CorruptRecord` names the object."""
    try:
        return kube_projection.record_of(kind, found, key)
    except Damaged as error:
        raise Damaged(f"{shown(kind, found.metadata.name)}: {error}") from error


def shown(kind: str, name: str) -> str:
    """Kind and name of the object, for messages."""
    match kind:
        case "cluster":
            return f"ClusterAdvertisement {name}"
        case "reservation":
            return f"Reservation {name}"
    return f"{LedgerRecord.kind} {name}"


def _take_all(found: Found, sights: Sights, kind: RecordKind, listed: Listing[Stored]) -> None:
    _check(kind, listed)
    for one in listed.objects:
        _take(found, sights, kind, one)


def _take_documents(found: Found, sights: Sights, listed: Listing[LedgerRecord]) -> None:
    _check("document", listed)
    for document in listed.objects:
        if document.contents in kube_projection.DECODERS:
            _take(found, sights, document.contents, document)


def _take(found: Found, sights: Sights, kind: RecordKind, one: Seen) -> None:
    key = (kind, one.metadata.name)
    if isinstance(one, Stored) and one.is_robbed and kind == "reservation":
        raise Damaged(f"{shown(*key)}: its record was removed from the status")
    if one.record is None or one.record == BLANK:
        cached = sights.saw(kind, one)
        if cached.is_own:
            found.blanks.append((key, cached))
        if isinstance(one, Stored) and kind == "cluster" and one.was_filled:
            found.robbed.add(key)
        return
    read = found.records[key] = record(kind, one, sights.seal_key)
    sights.saw(kind, one, getattr(read, "finished_at", None))


def _take_back(found: Found, sights: Sights, listed: Listing[Stored]) -> None:
    """Unfinished reservations among those with the archive label."""
    _check("reservation", listed)
    for one in listed.objects:
        if not one.is_archived or one.record is None:
            continue
        if _is_unfinished(record("reservation", one, sights.seal_key)):
            _take(found, sights, "reservation", one)
            found.astray.append(("reservation", one.metadata.name))


def _check_missing(found: Found, listed: Listing[Stored], state: State) -> None:
    """A deleted object counts as released. One with the finalizer but without a record is an error."""
    if not state.unfinished or roll(found.records, state.key).digest == state.unfinished:
        return
    for one in listed.objects:
        is_held = RESERVATION_FINALIZER in one.metadata.finalizers
        if (
            is_held
            and one.record is None
            and ("reservation", one.metadata.name) not in found.records
        ):
            which = shown("reservation", one.metadata.name)
            raise Damaged(
                f"{which}: its status was cleared;"
                " to release what it held, delete it and its finalizer"
            )


def _is_unfinished(record: Any) -> bool:
    return isinstance(record, Reservation) and record.finished_at is None


def _check(kind: str, listed: Listing[Any]) -> None:
    for one in listed.unreadable:
        raise Damaged(f"{shown(kind, one.name)}: {one.problem}")
