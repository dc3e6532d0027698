"""One SQLite file: made, locked, opened, written in transactions and closed. Knows nothing of records.

The broker opens it with `open_writer`, and no second one can: a lock file beside it is held with
`flock`, which the kernel lets go of however the process ends. SQLite's own locks do not serve for that,
because `open_reader` must be able to read beside a running broker.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

from kubelend.core.errors import InvalidSettings, StoreFailed
from kubelend.kits import keyfiles, modes
from kubelend.stores import failures, schema
from kubelend.stores.schema import Migration

ROOM = 2**20
"""Bytes that must be free for a store to count as writable: more than a group of changes needs."""

BUSY_SECONDS = 5.0
"""How long to wait for a person's `sqlite3` shell that holds the file."""

_STATEMENTS = 256
"""Prepared statements to keep: more than the store has, of every size."""

_PRAGMAS = (
    # FULL: a commit returns after the log has been synced, so it survives a power cut.
    "PRAGMA synchronous = FULL",
    # The log is written back every 4 MB, and cut down again when one big commit made it longer.
    "PRAGMA wal_autocheckpoint = 1000",
    f"PRAGMA journal_size_limit = {16 * 2**20}",
    "PRAGMA cell_size_check = ON",
    # What is written in the event loop (`SqliteStore.prepare`) must not reach the disk before its commit.
    "PRAGMA cache_spill = OFF",
    "PRAGMA temp_store = MEMORY",
)


class Database:
    """An open file. Used by one thread at a time, which need not be the one that opened it."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int | None) -> None:
        self.path = path
        self.connection = connection
        self._lock = lock
        self._patience = BUSY_SECONDS
        self._identity = _identity(path)

    @property
    def is_writable(self) -> bool:
        return self._lock is not None

    @contextmanager
    def transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[sqlite3.Connection]:
        """All of the body or nothing of it; durable when it is left without an error."""
        with failures.translated(self.path):
            self._check_in_place()
            self._wait_for_others(BUSY_SECONDS)
            self.connection.execute(f"BEGIN {kind}")
        with self.undone_on_error() as connection:
            yield connection
            connection.execute("COMMIT")

    def try_to_begin(self) -> bool:
        """Begin to write without waiting; False if somebody else writes. `commit` is still to come."""
        with failures.translated(self.path):
            self._check_in_place()
            self._wait_for_others(0)
            try:
                self.connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if failures.is_busy(error):
                    return False
                raise
        return True

    @contextmanager
    def undone_on_error(self) -> Iterator[sqlite3.Connection]:
        """A part of a transaction that has begun: if it fails, all of it has not been."""
        with failures.translated(self.path):
            try:
                yield self.connection
            except BaseException:
                # SQLite has rolled back by itself after some errors; the first error is the one to tell.
                with suppress(sqlite3.Error):
                    self.connection.rollback()
                raise

    def commit(self) -> None:
        """End what `try_to_begin` has begun; durable when this returns."""
        with self.undone_on_error() as connection:
            connection.execute("COMMIT")

    def check_room(self) -> None:
        """Fail now if the next commit would, for want of space or of permission."""
        with failures.translated(self.path), tempfile.TemporaryFile(dir=self.path.parent) as file:
            file.write(bytes(ROOM))
            file.flush()

    def close(self) -> None:
        """Let go of the file, then of the lock. Closing again does nothing."""
        with failures.translated(self.path):
            self.connection.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _wait_for_others(self, seconds: float) -> None:
        """So long from now on; to say it again would cost every group a hundredth of its time."""
        if seconds != self._patience:
            self.connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000):d}")
            self._patience = seconds

    def _check_in_place(self) -> None:
        """A file that was deleted or replaced still takes writes, which nobody will ever read."""
        if _identity(self.path) != self._identity:
            raise StoreFailed(
                f"the store {self.path} was replaced while it was in use", hint="restart the broker"
            )


def open_writer(path: Path, migrations: Sequence[Migration] = schema.MIGRATIONS) -> Database:
    """Open a file for its one broker; made if it is missing, migrated if it is old."""
    path = _located(path)
    with failures.translated(path), ExitStack() as undo:
        _make_directory(path.parent)
        lock = _lock(path)
        undo.callback(os.close, lock)
        if not path.exists():
            _create(path)
        connection = _connect(path, "rw")
        undo.callback(connection.close)
        version = schema.check(connection, path, migrations)
        _configure(connection, path)
        schema.migrate(connection, version, migrations)
        database = Database(path, connection, lock)
        undo.pop_all()
        return database


def open_reader(path: Path, migrations: Sequence[Migration] = schema.MIGRATIONS) -> Database:
    """Open a file that a broker may be using, for reading only."""
    path = _located(path)
    with failures.translated(path), ExitStack() as undo:
        if not path.exists():
            raise InvalidSettings(f"there is no store {path}", hint="check the path")
        connection = _connect(path, "ro&immutable=1" if _is_at_rest(path) else "ro")
        undo.callback(connection.close)
        if schema.check(connection, path, migrations) < len(migrations):
            raise InvalidSettings(
                f"{path} was written by an older version", hint="start a broker on it once"
            )
        database = Database(path, connection, None)
        undo.pop_all()
        return database


def exposures(path: Path) -> list[str]:
    """What others can read or replace of a file that exists, a sentence each."""
    located = Path(os.path.realpath(path))
    # The log and its index have what the file will have.
    files = (located, *(located.with_name(located.name + end) for end in ("-wal", "-shm")))
    complaints = filter(None, (keyfiles.exposure(file, holds="the ledger") for file in files))
    first = next(complaints, "")
    found = (
        first and f"{first}; chmod 600 {located}*",
        modes.exposed_directory(located.parent),
    )
    return [complaint for complaint in found if complaint]


def _located(path: Path) -> Path:
    """Without symbolic links: two names of one file must share one lock."""
    located = Path(os.path.realpath(path))
    with failures.translated(located):
        if located.is_dir():
            raise InvalidSettings(f"{path} is a directory", hint="name a file in it")
        # SQLite takes an empty file for a new database, and would throw away the log beside it.
        if located.exists() and located.stat().st_size == 0:
            raise InvalidSettings(
                f"{path} is empty, so no Kubelend store",
                hint="restore a backup, or remove it to start with nothing",
            )
    return located


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    _sync_directory(directory.parent)


def _lock(path: Path) -> int:
    """Held by the descriptor that is returned. The file stays: removing it would race with an opener."""
    lock = os.open(path.with_name(f"{path.name}-lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise StoreFailed(
            f"the store {path} is in use by another broker",
            hint="stop that one, or name another file",
        ) from None
    return lock


def _create(path: Path) -> None:
    """Put a database without tables at `path`, whole or not at all: so an empty file is never ours."""
    fresh = path.with_name(f"{path.name}-new")
    fresh.unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(_connect(fresh, "rw")) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID:d}")
    fresh.rename(path)
    _sync_directory(path.parent)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )


def _configure(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
        raise StoreFailed(
            f"the store {path} cannot keep a write-ahead log", hint="put it on a local disk"
        )
    for pragma in _PRAGMAS:
        connection.execute(pragma)


def _is_at_rest(path: Path) -> bool:
    """A file without a log, in a directory where none can be made: a mounted backup, for example.

    SQLite reads such a file only if told that nobody will change it.
    """
    log = path.with_name(f"{path.name}-wal")
    return not log.exists() and not os.access(path.parent, os.W_OK)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
