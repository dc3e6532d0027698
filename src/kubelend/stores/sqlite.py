"""The default store: one SQLite file with one writer. A commit is durable when it returns.

`SqliteStore.open` is for the broker that owns the file, `SqliteStore.open_readonly` for readers beside it.
The constructor does not open the file, so that a store can use any open database.
"""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import msgspec

from kubelend.core.events import Change, Kind
from kubelend.core.journal import Head, Line
from kubelend.core.models import Reservation, ReservationId
from kubelend.core.records import Records
from kubelend.stores import batches, databases, journals, records, statements, writing
from kubelend.stores.batches import Batch
from kubelend.stores.databases import Database
from kubelend.stores.numbering import Numbering
from kubelend.stores.records import Damaged, Some
from kubelend.stores.statements import Rows
from kubelend.stores.writing import MOST_CHANGES, Position, Writing


class SqliteStore:
    """Stores records in one SQLite file."""

    def __init__(self, database: Database, *, archive_for: timedelta = batches.ARCHIVE_FOR) -> None:
        self._database = database
        self._checked = (
            _WORKING_SET if database.is_writable else (*_WORKING_SET, "archive", "journal")
        )
        self._archive_for = archive_for
        self._position: Position | None = None
        """Known after the first read or write: no one else writes the file."""

    @classmethod
    def open(cls, path: Path, *, archive_for: timedelta = batches.ARCHIVE_FOR) -> SqliteStore:
        """Open or create the file. Only one process can have it open for writing."""
        return cls(databases.open_writer(path), archive_for=archive_for)

    @classmethod
    def open_readonly(cls, path: Path) -> SqliteStore:
        """Open an existing file, also while a broker uses it; each load is a consistent snapshot."""
        return cls(databases.open_reader(path))

    def load(self) -> Records:
        """Fails on a damaged file, and if the next commit would have no space."""
        if self._database.is_writable:
            self._database.check_room()
        with _no_collection(), self._database.transaction("DEFERRED") as connection:
            _check_pages(connection, self._checked)
            clusters = [
                records.decode(records.CLUSTERS, row) for row in connection.execute(_CLUSTERS)
            ]
            numbered = _numbered(connection)
            row_ids = Numbering((number, found.id) for number, found in numbered)
            self._position = _position(connection, row_ids)
            return Records(
                clusters,
                [found for _, found in numbered],
                self._position.revision,
                _documents(connection, "member", records.MEMBERS),
                _documents(connection, "token", records.TOKENS),
                _documents(connection, "limits", records.LIMITS),
            )

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        self._commit(self._encode(changes, revision))

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        """Write a small group now: SQLite keeps it in memory, and only the commit waits for the disk.

        Every statement releases and reacquires the GIL. In a thread this contends with the event loop
        each time, which costs more than the statement.
        """
        if len(changes) > MOST_CHANGES or self._position is None:
            return partial(self.commit, changes, revision)
        group = self._encode(changes, revision)
        if not group.is_small or not self._database.try_to_begin():
            return partial(self._commit, group)
        with self._database.undone_on_error() as connection:
            self._write(connection, group)
        return partial(self._finish, group)

    def archived(self, reservation: ReservationId) -> Reservation | None:
        with self._database.transaction("DEFERRED") as connection:
            return _find(connection, _ARCHIVED, records.key(reservation))

    def lines(self, after: int, limit: int) -> list[Line]:
        with self._database.transaction("DEFERRED") as connection:
            return journals.read(connection, after, limit)

    def journal_ends(self) -> tuple[Head, Head]:
        with self._database.transaction("DEFERRED") as connection:
            return journals.ends(connection)

    def check(self) -> None:
        """No other writer can exist: the file is locked."""

    def close(self) -> None:
        self._database.close()

    def _encode(self, changes: Sequence[Change], revision: int) -> Writing:
        return writing.encode(batches.fold(changes), revision, self._known_position())

    def _commit(self, group: Writing) -> None:
        with self._database.transaction("IMMEDIATE") as connection:
            self._write(connection, group)
        self._keep(group)

    def _finish(self, group: Writing) -> None:
        self._database.commit()
        self._keep(group)

    def _write(self, connection: sqlite3.Connection, group: Writing) -> None:
        statements.put(connection, _PUT_CLUSTERS, group.clusters)
        statements.put(connection, _PUT_RESERVATIONS, group.reservations)
        journals.put(connection, group.lines)
        _drop_clusters(connection, group.batch)
        _put_documents(connection, group.batch)
        self._archive(connection, group)
        if group.batch.cut:
            journals.cut(connection, group.batch.cut)
        connection.execute(_SET_REVISION, (*_revision_row(group.revision), *group.end))

    def _keep(self, group: Writing) -> None:
        row_ids = self._known_position().numbering
        row_ids.keep(group.numbers, group.batch.archived)
        self._position = Position(group.revision, group.end, row_ids)

    def _known_position(self) -> Position:
        if self._position is None:
            with self._database.transaction("DEFERRED") as connection:
                row_ids = Numbering(connection.execute(_NUMBERS))
                self._position = _position(connection, row_ids)
        return self._position

    def _archive(self, connection: sqlite3.Connection, group: Writing) -> None:
        if not group.batch.archived:
            return
        known = self._known_position().numbering
        finish_times = {}
        for found in group.batch.archived:
            number = group.numbers.get(found) or known.find(found)
            finish_times[number] = batches.finish(found, _find(connection, _RESERVATION, number))
        connection.executemany(_ARCHIVE, [(_text(at), found) for found, at in finish_times.items()])
        connection.executemany(_FORGET, [(found,) for found in finish_times])
        retention_limit = batches.kept_from(finish_times.values(), self._archive_for)
        connection.execute(_PRUNE, (_text(retention_limit),))


# A reader also checks the archive; a start must not take longer because of old reservations.
_WORKING_SET = ("meta", "clusters", "reservations", "documents")

# Texts are read as bytes: the decoder takes them so, and a damaged one must reach the checksum.
_CLUSTERS = "SELECT CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM clusters"
_NUMBERED = "SELECT number, CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM reservations"
_NUMBERS = "SELECT number, id FROM reservations"
_DOCUMENTS = """
    SELECT CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM documents WHERE kind = ?
"""
_RESERVATION = """
    SELECT CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM reservations WHERE number = ?
"""
_ARCHIVED = """
    SELECT CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM archive WHERE id = CAST(? AS TEXT)
"""
_REVISION = "SELECT value, checksum FROM meta WHERE key = 'revision'"

# Upserts: REPLACE would delete and insert, at twice the cost.
_PUT_CLUSTERS = Rows(
    "INSERT INTO clusters (id, checksum, record) VALUES",
    "(?, ?, CAST(? AS TEXT))",
    "ON CONFLICT (id) DO UPDATE SET checksum = excluded.checksum, record = excluded.record",
)
_PUT_RESERVATIONS = Rows(
    "INSERT INTO reservations (number, phase, id, checksum, record) VALUES",
    "(?, ?, ?, ?, CAST(? AS TEXT))",
    "ON CONFLICT (number) DO UPDATE"
    " SET phase = excluded.phase, checksum = excluded.checksum, record = excluded.record",
)
_PUT_DOCUMENTS = Rows(
    "INSERT OR REPLACE INTO documents (kind, id, checksum, record) VALUES",
    "(?, ?, ?, CAST(? AS TEXT))",
)
_DROP_DOCUMENT = "DELETE FROM documents WHERE kind = ? AND id = CAST(? AS TEXT)"
_DROP_CLUSTER = "DELETE FROM clusters WHERE id = CAST(? AS TEXT)"
_ARCHIVE = """
    INSERT OR REPLACE INTO archive (id, finished_at, checksum, record)
    SELECT id, ?, checksum, record FROM reservations WHERE number = ?
"""
_FORGET = "DELETE FROM reservations WHERE number = ?"
_PRUNE = "DELETE FROM archive WHERE finished_at < ?"
_SET_REVISION = """
    UPDATE meta SET value = ?, checksum = ?, line = ?, digest = ? WHERE key = 'revision'
"""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Loading creates many records and no garbage: collection would take longer than reading."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_pages(connection: sqlite3.Connection, tables: Iterable[str]) -> None:
    """Detects what row checksums cannot: rows hidden or duplicated by a broken page or index."""
    for table in tables:
        (error,) = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
        if error != "ok":
            raise Damaged(str(error))


def _position(connection: sqlite3.Connection, numbering: Numbering) -> Position:
    return Position(_revision(connection), journals.ends(connection)[1], numbering)


def _revision(connection: sqlite3.Connection) -> int:
    value, expected = connection.execute(_REVISION).fetchone() or (0, None)
    if _revision_row(value) != (value, expected):
        raise Damaged("its revision does not match its checksum")
    revision: int = value
    return revision


def _revision_row(revision: int) -> tuple[int, int]:
    return revision, records.checksum(b"revision", str(revision).encode())


def _documents(
    connection: sqlite3.Connection, kind: Kind, decoder: msgspec.json.Decoder[Some]
) -> list[Some]:
    return [records.decode(decoder, row) for row in connection.execute(_DOCUMENTS, (kind,))]


def _drop_clusters(connection: sqlite3.Connection, batch: Batch) -> None:
    dropped = [(records.key(name),) for name, found in batch.clusters.items() if not found]
    if dropped:
        connection.executemany(_DROP_CLUSTER, dropped)


def _put_documents(connection: sqlite3.Connection, batch: Batch) -> None:
    rows = [(kind, *records.encode(found)) for (kind, _), found in batch.documents.items() if found]
    statements.put(connection, _PUT_DOCUMENTS, rows)
    deleted = [
        (kind, records.key(name)) for (kind, name), found in batch.documents.items() if not found
    ]
    if deleted:
        connection.executemany(_DROP_DOCUMENT, deleted)


def _numbered(connection: sqlite3.Connection) -> list[tuple[int, Reservation]]:
    return [
        (number, records.decode(records.RESERVATIONS, (name, checksum, text)))
        for number, name, checksum, text in connection.execute(_NUMBERED)
    ]


def _find(
    connection: sqlite3.Connection, query: str, key: bytes | int | None
) -> Reservation | None:
    row = connection.execute(query, (key,)).fetchone()
    return None if row is None else records.decode(records.RESERVATIONS, row)


def _text(at: datetime) -> str:
    """Of fixed length and in UTC, so that texts sort as the times do."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")
