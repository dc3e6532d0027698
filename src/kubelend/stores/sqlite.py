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
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubelend.core import audit_log
from kubelend.core.audit_log import AuditLine, ChainHead
from kubelend.core.events import Change, DocumentKind, StoreLag, WorkingSet
from kubelend.core.models import Reservation, ReservationId
from kubelend.stores import batch as stores_batch
from kubelend.stores import sqlite_file
from kubelend.stores.batch import CorruptRecord, RecordType, WriteBatch
from kubelend.stores.sqlite_file import SqliteFile


class RowIds:
    """Row numbers in the file, and those that a commit is about to add."""

    def __init__(self, rows: Iterable[tuple[int, ReservationId]]) -> None:
        self._row_ids: dict[ReservationId, int] = {}
        for number, reservation in rows:
            if self._row_ids.setdefault(reservation, number) != number:
                raise CorruptRecord(f"it contains reservation {reservation!r} twice")
        self._last = max(self._row_ids.values(), default=0)

    def find(self, reservation: ReservationId) -> int | None:
        return self._row_ids.get(reservation)

    def assign(self, reservations: Iterable[ReservationId]) -> dict[ReservationId, int]:
        """Row numbers for a commit. New ones are not stored yet, because the commit may fail."""
        last = self._last
        numbers = {}
        for reservation in reservations:
            number = self._row_ids.get(reservation)
            if number is None:
                number = last = last + 1
            numbers[reservation] = number
        return numbers

    def apply_commit(
        self, committed: dict[ReservationId, int], archived: Iterable[ReservationId]
    ) -> None:
        self._row_ids.update(committed)
        self._last = max(self._last, *committed.values(), 0)
        for reservation in archived:
            self._row_ids.pop(reservation, None)


SMALL_COMMIT_CHANGES = 128
SMALL_COMMIT_BYTES = 2**17
"""Limits of a small group, which SQLite writes within one or two milliseconds."""


class FilePosition(NamedTuple):
    """The state of the file that the next group builds on."""

    revision: int
    end: ChainHead
    """Of the audit log."""
    row_ids: RowIds


class PreparedCommit(NamedTuple):
    """One encoded group, and the position after it."""

    batch: WriteBatch
    revision: int
    end: ChainHead
    row_ids: dict[ReservationId, int]
    """Row numbers of the batch's reservations."""
    clusters: list[tuple[str, int, bytes]]
    reservations: list[tuple[int, str, str, int, bytes]]
    lines: list[AuditLine]

    @property
    def is_small(self) -> bool:
        """Whether it has only frequent kinds of changes, not many, and none that needs a read."""
        batch = self.batch
        others = batch.archived or batch.documents or batch.truncate_to or batch.copied_log
        texts = chain((row[-1] for row in self.clusters), (row[-1] for row in self.reservations))
        size = sum(map(len, texts)) + sum(len(line.text) for line in self.lines)
        return not others and size <= SMALL_COMMIT_BYTES


def prepare_commit(batch: WriteBatch, revision: int, position: FilePosition) -> PreparedCommit:
    """Fails on a record that cannot be stored, and on a group that is behind the file."""
    stores_batch.check_revision(position.revision, revision)
    numbers = position.row_ids.assign(batch.reservations)
    reservations = [
        (numbers[found.id], found.phase.value, *stores_batch.encode_record(found))
        for found in batch.reservations.values()
    ]
    clusters = [stores_batch.encode_record(found) for found in batch.clusters.values() if found]
    lines = batch.chained_lines(position.end)
    end = lines[-1].head if lines else position.end
    return PreparedCommit(batch, revision, end, numbers, clusters, reservations, lines)


MAX_ROWS_PER_STATEMENT = 64
"""In one statement. Each number of rows is a statement of its own, which SQLite prepares once."""


class InsertStatement(NamedTuple):
    """An INSERT statement for any number of rows."""

    head: str
    row: str
    tail: str = ""


def insert_rows(
    connection: sqlite3.Connection, statement: InsertStatement, values: Sequence[tuple[object, ...]]
) -> None:
    """In as few statements as possible: each one releases and reacquires the GIL."""
    for start in range(0, len(values), MAX_ROWS_PER_STATEMENT):
        some = values[start : start + MAX_ROWS_PER_STATEMENT]
        connection.execute(_statement_text(statement, len(some)), tuple(chain.from_iterable(some)))


@cache
def _statement_text(statement: InsertStatement, size: int) -> str:
    return f"{statement.head} {', '.join([statement.row] * size)} {statement.tail}"


class SqliteStore:
    """Stores records in one SQLite file."""

    def __init__(
        self, database: SqliteFile, *, archive_for: timedelta = stores_batch.ARCHIVE_FOR
    ) -> None:
        self._file = database
        self._checked_tables = (
            _WORKING_SET if database.is_writable else (*_WORKING_SET, "archive", "audit_log")
        )
        self._archive_for = archive_for
        self._position: FilePosition | None = None
        """Known after the first read or write: no one else writes the file."""

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        archive_for: timedelta = stores_batch.ARCHIVE_FOR,
        may_create: bool = True,
    ) -> SqliteStore:
        """Open the file, or create it. Only one process can have it open for writing."""
        return cls(sqlite_file.open_writer(path, may_create=may_create), archive_for=archive_for)

    @classmethod
    def open_readonly(cls, path: Path) -> SqliteStore:
        """Open an existing file, also while a broker uses it; each load is a consistent snapshot."""
        return cls(sqlite_file.open_reader(path))

    def load(self) -> WorkingSet:
        """Fails on a damaged file, and if the next commit would have no space."""
        if self._file.is_writable:
            self._file.check_free_space()
        recorded = (
            self._file.recorded_revision()
        )  # before the snapshot, which a writer may overtake
        with _gc_disabled(), self._file.transaction("DEFERRED") as connection:
            _check_integrity(connection, self._checked_tables)
            clusters = [
                stores_batch.decode_record(stores_batch.CLUSTER_DECODER, row)
                for row in connection.execute(_SELECT_CLUSTERS)
            ]
            numbered = [
                (row[0], stores_batch.decode_record(stores_batch.RESERVATION_DECODER, row[1:]))
                for row in connection.execute(_SELECT_RESERVATIONS)
            ]
            row_ids = RowIds((number, found.id) for number, found in numbered)
            self._position = _read_position(connection, row_ids)
            _check_complete(self._position.revision, recorded)
            self._file.record_revision(self._position.revision)
            return WorkingSet(
                clusters,
                [found for _, found in numbered],
                self._position.revision,
                _read_documents(connection, "member", stores_batch.MEMBER_DECODER),
                _read_documents(connection, "token", stores_batch.TOKEN_DECODER),
                _read_documents(connection, "limits", stores_batch.LIMITS_DECODER),
            )

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        self._commit(self._prepare(changes, revision))

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        """Write a small group now: SQLite keeps it in memory, and only the commit waits for the disk.

        Every statement releases and reacquires the GIL. In a thread this contends with the event loop
        each time, which costs more than the statement.
        """
        if len(changes) > SMALL_COMMIT_CHANGES or self._position is None:
            return partial(self.commit, changes, revision)
        group = self._prepare(changes, revision)
        if not group.is_small or not self._file.try_begin():
            return partial(self._commit, group)
        with self._file.rollback_on_error() as connection:
            self._execute(connection, group)
        return partial(self._commit_prepared, group)

    def archived(self, reservation: ReservationId) -> Reservation | None:
        key = stores_batch.record_key(reservation)
        with self._file.transaction("DEFERRED") as connection:
            return _find_reservation(connection, _SELECT_ARCHIVED, key)

    def archive(self) -> list[Reservation]:
        """All archived reservations."""
        with self._file.transaction("DEFERRED") as connection:
            return [
                stores_batch.decode_record(stores_batch.RESERVATION_DECODER, row)
                for row in connection.execute(_SELECT_ARCHIVE)
            ]

    def audit_lines(self, after: int, limit: int) -> list[AuditLine]:
        with self._file.transaction("DEFERRED") as connection:
            return read_audit_lines(connection, after, limit)

    def audit_log_bounds(self) -> tuple[ChainHead, ChainHead]:
        with self._file.transaction("DEFERRED") as connection:
            return audit_log_bounds(connection)

    def check_fencing(self) -> None:
        """No other writer can exist: the file is locked."""

    def lag(self) -> StoreLag:
        """Nothing else shows what is committed."""
        return StoreLag()

    def close(self) -> None:
        self._file.close()

    def _prepare(self, changes: Sequence[Change], revision: int) -> PreparedCommit:
        return prepare_commit(stores_batch.fold(changes), revision, self._known_position())

    def _commit(self, group: PreparedCommit) -> None:
        with self._file.transaction("IMMEDIATE") as connection:
            self._execute(connection, group)
        self._update_position(group)

    def _commit_prepared(self, group: PreparedCommit) -> None:
        self._file.commit()
        self._update_position(group)

    def _execute(self, connection: sqlite3.Connection, group: PreparedCommit) -> None:
        insert_rows(connection, _UPSERT_CLUSTERS, group.clusters)
        insert_rows(connection, _UPSERT_RESERVATIONS, group.reservations)
        insert_rows(connection, _INSERT_AUDIT_LINES, group.lines)
        _delete_clusters(connection, group.batch)
        _write_documents(connection, group.batch)
        self._archive(connection, group)
        if group.batch.copied_log is not None:
            connection.execute(_UPDATE_AUDIT_LOG_START, group.batch.copied_log.start)
        if group.batch.truncate_to:
            truncate_audit_lines(connection, group.batch.truncate_to)
        connection.execute(_UPDATE_REVISION, (*_revision_row(group.revision), *group.end))

    def _update_position(self, group: PreparedCommit) -> None:
        row_ids = self._known_position().row_ids
        row_ids.apply_commit(group.row_ids, group.batch.archived)
        self._file.record_revision(group.revision)
        self._position = FilePosition(group.revision, group.end, row_ids)

    def _known_position(self) -> FilePosition:
        if self._position is None:
            with self._file.transaction("DEFERRED") as connection:
                row_ids = RowIds(connection.execute(_SELECT_ROW_IDS))
                self._position = _read_position(connection, row_ids)
        return self._position

    def _archive(self, connection: sqlite3.Connection, group: PreparedCommit) -> None:
        if not group.batch.archived:
            return
        known = self._known_position().row_ids
        finish_times = {}
        for reservation in group.batch.archived:
            number = group.row_ids.get(reservation) or known.find(reservation)
            found = _find_reservation(connection, _SELECT_RESERVATION, number)
            finish_times[number] = stores_batch.finish_time(reservation, found)
        rows = [(_sortable_timestamp(at), number) for number, at in finish_times.items()]
        connection.executemany(_ARCHIVE_RESERVATION, rows)
        connection.executemany(_DELETE_RESERVATION, [(number,) for number in finish_times])
        oldest = stores_batch.compute_retention_limit(finish_times.values(), self._archive_for)
        connection.execute(_DELETE_EXPIRED, (_sortable_timestamp(oldest),))


# A reader also checks the archive; a start must not take longer because of old reservations.
_WORKING_SET = ("meta", "clusters", "reservations", "documents")

# Texts are read as bytes: the decoder takes them so, and a damaged one must reach the checksum.
_SELECT_CLUSTERS = "SELECT CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM clusters"
_SELECT_RESERVATIONS = (
    "SELECT number, CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM reservations"
)
_SELECT_ROW_IDS = "SELECT number, id FROM reservations"
_SELECT_DOCUMENTS = """
    SELECT CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM documents WHERE kind = ?
"""
_SELECT_RESERVATION = """
    SELECT CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM reservations WHERE number = ?
"""
_SELECT_ARCHIVE = "SELECT CAST(id AS BLOB), checksum, CAST(record AS BLOB) FROM archive"
_SELECT_ARCHIVED = f"{_SELECT_ARCHIVE} WHERE id = CAST(? AS TEXT)"
_SELECT_REVISION = "SELECT value, checksum FROM meta WHERE key = 'revision'"

# Upserts: REPLACE would delete and insert, at twice the cost.
_UPSERT_CLUSTERS = InsertStatement(
    "INSERT INTO clusters (id, checksum, record) VALUES",
    "(?, ?, CAST(? AS TEXT))",
    "ON CONFLICT (id) DO UPDATE SET checksum = excluded.checksum, record = excluded.record",
)
_UPSERT_RESERVATIONS = InsertStatement(
    "INSERT INTO reservations (number, phase, id, checksum, record) VALUES",
    "(?, ?, ?, ?, CAST(? AS TEXT))",
    "ON CONFLICT (number) DO UPDATE"
    " SET phase = excluded.phase, checksum = excluded.checksum, record = excluded.record",
)
_UPSERT_DOCUMENTS = InsertStatement(
    "INSERT OR REPLACE INTO documents (kind, id, checksum, record) VALUES",
    "(?, ?, ?, CAST(? AS TEXT))",
)
_DELETE_DOCUMENT = "DELETE FROM documents WHERE kind = ? AND id = CAST(? AS TEXT)"
_DELETE_CLUSTER = "DELETE FROM clusters WHERE id = CAST(? AS TEXT)"
_ARCHIVE_RESERVATION = """
    INSERT OR REPLACE INTO archive (id, finished_at, checksum, record)
    SELECT id, ?, checksum, record FROM reservations WHERE number = ?
"""
_DELETE_RESERVATION = "DELETE FROM reservations WHERE number = ?"
_DELETE_EXPIRED = "DELETE FROM archive WHERE finished_at < ?"
_UPDATE_REVISION = """
    UPDATE meta SET value = ?, checksum = ?, line = ?, digest = ? WHERE key = 'revision'
"""


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Loading creates many records and no garbage: collection would take longer than reading."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_integrity(connection: sqlite3.Connection, tables: Iterable[str]) -> None:
    """Detects what row checksums cannot: rows hidden or duplicated by a broken page or index."""
    for table in tables:
        (error,) = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
        if error != "ok":
            raise CorruptRecord(str(error))


def _check_complete(revision: int, recorded: int) -> None:
    """Detects a log that was damaged, cut short or removed: SQLite takes what is left of it for all."""
    if revision < recorded:
        raise CorruptRecord(
            f"it ends at revision {revision}, but revision {recorded} was committed"
        )


def _read_position(connection: sqlite3.Connection, row_ids: RowIds) -> FilePosition:
    return FilePosition(_read_revision(connection), audit_log_bounds(connection)[1], row_ids)


def _read_revision(connection: sqlite3.Connection) -> int:
    value, expected = connection.execute(_SELECT_REVISION).fetchone() or (0, None)
    if _revision_row(value) != (value, expected):
        raise CorruptRecord("its revision does not match its checksum")
    revision: int = value
    return revision


def _revision_row(revision: int) -> tuple[int, int]:
    return revision, stores_batch.record_checksum(b"revision", str(revision).encode())


def _read_documents(
    connection: sqlite3.Connection, kind: DocumentKind, decoder: msgspec.json.Decoder[RecordType]
) -> list[RecordType]:
    return [
        stores_batch.decode_record(decoder, row)
        for row in connection.execute(_SELECT_DOCUMENTS, (kind,))
    ]


def _delete_clusters(connection: sqlite3.Connection, batch: WriteBatch) -> None:
    dropped = [
        (stores_batch.record_key(name),) for name, found in batch.clusters.items() if not found
    ]
    if dropped:
        connection.executemany(_DELETE_CLUSTER, dropped)


def _write_documents(connection: sqlite3.Connection, batch: WriteBatch) -> None:
    rows = [
        (kind, *stores_batch.encode_record(found))
        for (kind, _), found in batch.documents.items()
        if found
    ]
    insert_rows(connection, _UPSERT_DOCUMENTS, rows)
    deleted = [
        (kind, stores_batch.record_key(name))
        for (kind, name), found in batch.documents.items()
        if not found
    ]
    if deleted:
        connection.executemany(_DELETE_DOCUMENT, deleted)


def _find_reservation(
    connection: sqlite3.Connection, query: str, key: bytes | int | None
) -> Reservation | None:
    row = connection.execute(query, (key,)).fetchone()
    return (
        None if row is None else stores_batch.decode_record(stores_batch.RESERVATION_DECODER, row)
    )


def _sortable_timestamp(at: datetime) -> str:
    """Of fixed length and in UTC, so that texts sort as the times do."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")


_INSERT_AUDIT_LINES = InsertStatement(
    "INSERT INTO audit_log (number, line, digest) VALUES", "(?, CAST(? AS TEXT), ?)"
)
_SELECT_AUDIT_LINES = """
    SELECT number, CAST(line AS BLOB), digest FROM audit_log WHERE number > ? ORDER BY number LIMIT ?
"""
_SELECT_AUDIT_LOG_END = "SELECT line, digest FROM meta WHERE key = 'revision'"
_SELECT_AUDIT_LOG_START = "SELECT value, digest FROM meta WHERE key = 'audit log start'"
_UPDATE_AUDIT_LOG_START = "UPDATE meta SET value = ?, digest = ? WHERE key = 'audit log start'"
_DELETE_AUDIT_LINES = "DELETE FROM audit_log WHERE number <= ?"


def truncate_audit_lines(connection: sqlite3.Connection, line: int) -> None:
    """Delete the lines up to this one; the chain head after it is stored."""
    for found in read_audit_lines(connection, line - 1, 1):
        if found.number == line:
            connection.execute(_UPDATE_AUDIT_LOG_START, (found.number, found.digest))
            connection.execute(_DELETE_AUDIT_LINES, (line,))


def read_audit_lines(connection: sqlite3.Connection, after: int, limit: int) -> list[AuditLine]:
    return [AuditLine(*row) for row in connection.execute(_SELECT_AUDIT_LINES, (after, limit))]


def audit_log_bounds(connection: sqlite3.Connection) -> tuple[ChainHead, ChainHead]:
    return _chain_head(connection, _SELECT_AUDIT_LOG_START), _chain_head(
        connection, _SELECT_AUDIT_LOG_END
    )


def _chain_head(connection: sqlite3.Connection, query: str) -> ChainHead:
    row: Sequence[object] | None = connection.execute(query).fetchone()
    return audit_log.CHAIN_START if row is None else ChainHead(*row)  # type: ignore[arg-type]
