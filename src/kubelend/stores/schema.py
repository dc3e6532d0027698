"""Migrations of the SQLite file. A released migration is never edited.

`PRAGMA user_version` counts the applied migrations, `PRAGMA application_id` identifies our files. Checked at
every open.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from kubelend.core.errors import InvalidSettings

Migration = tuple[str, ...]
"""Statements that are applied in one transaction."""

APPLICATION_ID = int.from_bytes(b"KLnd")

MIGRATIONS: tuple[Migration, ...] = (
    (
        """CREATE TABLE clusters (
            id TEXT PRIMARY KEY NOT NULL,
            checksum INTEGER NOT NULL,
            record TEXT NOT NULL
        )""",
        # The phase is for readers: a record omits defaults, and so the phase Pending.
        """CREATE TABLE reservations (
            id TEXT PRIMARY KEY NOT NULL,
            phase TEXT NOT NULL,
            checksum INTEGER NOT NULL,
            record TEXT NOT NULL
        )""",
        """CREATE TABLE archive (
            id TEXT PRIMARY KEY NOT NULL,
            finished_at TEXT NOT NULL,
            checksum INTEGER NOT NULL,
            record TEXT NOT NULL
        )""",
        "CREATE INDEX archive_by_finish ON archive (finished_at)",
        """CREATE TABLE meta (
            key TEXT PRIMARY KEY NOT NULL,
            value INTEGER NOT NULL,
            checksum INTEGER NOT NULL
        )""",
        "INSERT INTO meta VALUES ('revision', 0, 1717842607)",
    ),
    (
        # Members, tokens and limits: few of each.
        """CREATE TABLE documents (
            kind TEXT NOT NULL,
            id TEXT NOT NULL,
            checksum INTEGER NOT NULL,
            record TEXT NOT NULL,
            PRIMARY KEY (kind, id)
        )""",
        """CREATE TABLE journal (
            number INTEGER PRIMARY KEY NOT NULL,
            digest BLOB NOT NULL,
            line TEXT NOT NULL
        )""",
        # The end of the audit log is in the row of the revision, which every commit writes anyway.
        "ALTER TABLE meta ADD COLUMN line INTEGER NOT NULL DEFAULT 0",
        f"ALTER TABLE meta ADD COLUMN digest BLOB NOT NULL DEFAULT x'{'00' * 32}'",
        "INSERT INTO meta (key, value, checksum) VALUES ('journal start', 0, 0)",
    ),
    (
        # Rows in insertion order, and no index: see `RowIds`.
        "ALTER TABLE reservations RENAME TO indexed_reservations",
        """CREATE TABLE reservations (
            number INTEGER PRIMARY KEY NOT NULL,
            id TEXT NOT NULL,
            phase TEXT NOT NULL,
            checksum INTEGER NOT NULL,
            record TEXT NOT NULL
        )""",
        """INSERT INTO reservations
            SELECT rowid, id, phase, checksum, record FROM indexed_reservations""",
        "DROP TABLE indexed_reservations",
    ),
)


def check_schema_version(
    connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]
) -> int:
    """Reject a file that is not ours, or of an unknown schema version.

    Returns the number of applied migrations.
    """
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise InvalidSettings(
            f"{path} is not a Kubelend store", hint="choose another file, or restore a backup"
        )
    version = _pragma(connection, "user_version")
    if not 0 <= version <= len(migrations):
        raise InvalidSettings(
            f"{path} has schema version {version}, but this program supports up to {len(migrations)}",
            hint="run the newer version that wrote it",
        )
    return version


def apply_migrations(
    connection: sqlite3.Connection, version: int, migrations: Sequence[Migration]
) -> None:
    """Apply the missing migrations, one transaction each."""
    for number, statements in enumerate(migrations[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number:d}")
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            raise


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value
