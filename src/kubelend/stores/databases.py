"""One SQLite file: creation, lock, migrations, transactions and errors. Independent of the records.

The broker opens it with `open_writer`, which takes an exclusive `flock` on a file beside it; the kernel
releases the lock when the process ends. SQLite's own locks would also keep `open_reader` from reading
beside a running broker.
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

MIN_FREE_BYTES = 2**20
"""Bytes that must be free for a store to count as writable: more than one commit needs."""

BUSY_TIMEOUT_SECONDS = 5.0
"""How long to wait for another program, such as a `sqlite3` shell, that has locked the file."""

_STATEMENT_CACHE_SIZE = 256
"""Size of the cache of prepared statements: more than the store has, of every size."""

_PRAGMAS = (
    # FULL: a commit returns after the log has been synced, so it survives a power cut.
    "PRAGMA synchronous = FULL",
    # A checkpoint every 4 MB; the log is truncated again after one big commit made it longer.
    "PRAGMA wal_autocheckpoint = 1000",
    f"PRAGMA journal_size_limit = {16 * 2**20}",
    "PRAGMA cell_size_check = ON",
    # What is written in the event loop (`SqliteStore.prepare`) must not reach the disk before its commit.
    "PRAGMA cache_spill = OFF",
    "PRAGMA temp_store = MEMORY",
)


class SqliteFile:
    """An open file. Used by one thread at a time, not necessarily the one that opened it."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int | None) -> None:
        self.path = path
        self.connection = connection
        self._lock = lock
        self._busy_timeout = BUSY_TIMEOUT_SECONDS
        self._identity = _file_identity(path)

    @property
    def is_writable(self) -> bool:
        return self._lock is not None

    @contextmanager
    def transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[sqlite3.Connection]:
        """All of the body or nothing; durable when the body ends without an error."""
        with failures.translate_sqlite_errors(self.path):
            self._check_not_replaced()
            self._set_busy_timeout(BUSY_TIMEOUT_SECONDS)
            self.connection.execute(f"BEGIN {kind}")
        with self.rollback_on_error() as connection:
            yield connection
            connection.execute("COMMIT")

    def try_begin(self) -> bool:
        """Begin a write transaction without waiting; False if another one is open. Call `commit` later."""
        with failures.translate_sqlite_errors(self.path):
            self._check_not_replaced()
            self._set_busy_timeout(0)
            try:
                self.connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if failures.is_busy_error(error):
                    return False
                raise
        return True

    @contextmanager
    def rollback_on_error(self) -> Iterator[sqlite3.Connection]:
        """A part of an open transaction: an error rolls all of it back."""
        with failures.translate_sqlite_errors(self.path):
            try:
                yield self.connection
            except BaseException:
                # SQLite has rolled back by itself after some errors; the first error is raised.
                with suppress(sqlite3.Error):
                    self.connection.rollback()
                raise

    def commit(self) -> None:
        """Commit what `try_begin` has begun; durable on return."""
        with self.rollback_on_error() as connection:
            connection.execute("COMMIT")

    def check_free_space(self) -> None:
        """Fail now if the next commit would, for lack of space or permission."""
        with (
            failures.translate_sqlite_errors(self.path),
            tempfile.TemporaryFile(dir=self.path.parent) as file,
        ):
            file.write(bytes(MIN_FREE_BYTES))
            file.flush()

    def close(self) -> None:
        """Close the file, then release the lock. Idempotent."""
        with failures.translate_sqlite_errors(self.path):
            self.connection.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _set_busy_timeout(self, seconds: float) -> None:
        """Set the busy timeout if it differs; setting it each time would cost 1 % of a commit."""
        if seconds != self._busy_timeout:
            self.connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000):d}")
            self._busy_timeout = seconds

    def _check_not_replaced(self) -> None:
        """A file that was deleted or replaced still accepts writes, which nobody could read."""
        if _file_identity(self.path) != self._identity:
            raise StoreFailed(
                f"the store {self.path} was replaced while in use", hint="restart the broker"
            )


def open_writer(path: Path, migrations: Sequence[Migration] = schema.MIGRATIONS) -> SqliteFile:
    """Open a file for its only writer; created if missing, migrated if old."""
    path = _resolve_path(path)
    with failures.translate_sqlite_errors(path), ExitStack() as undo:
        _make_directory(path.parent)
        lock = _acquire_lock(path)
        undo.callback(os.close, lock)
        if not path.exists():
            _create_database(path)
        connection = _connect(path, "rw")
        undo.callback(connection.close)
        version = schema.check_schema_version(connection, path, migrations)
        _set_pragmas(connection, path)
        schema.apply_migrations(connection, version, migrations)
        database = SqliteFile(path, connection, lock)
        undo.pop_all()
        return database


def open_reader(path: Path, migrations: Sequence[Migration] = schema.MIGRATIONS) -> SqliteFile:
    """Open a file for reading only; a broker may be using it."""
    path = _resolve_path(path)
    with failures.translate_sqlite_errors(path), ExitStack() as undo:
        if not path.exists():
            raise InvalidSettings(f"the store {path} does not exist", hint="check the path")
        connection = _connect(path, "ro&immutable=1" if _is_immutable(path) else "ro")
        undo.callback(connection.close)
        if schema.check_schema_version(connection, path, migrations) < len(migrations):
            raise InvalidSettings(
                f"{path} was written by an older version", hint="start a broker on it once"
            )
        database = SqliteFile(path, connection, None)
        undo.pop_all()
        return database


def file_mode_problems(path: Path) -> list[str]:
    """What others can read or replace of an existing file, one sentence each."""
    located = Path(os.path.realpath(path))
    # The write-ahead log and its index contain the same data.
    files = (located, *(located.with_name(located.name + end) for end in ("-wal", "-shm")))
    complaints = filter(None, (keyfiles.mode_problem(file, content="the ledger") for file in files))
    first = next(complaints, "")
    found = (
        first and f"{first}; chmod 600 {located}*",
        modes.directory_mode_problem(located.parent),
    )
    return [complaint for complaint in found if complaint]


def _resolve_path(path: Path) -> Path:
    """Resolves symbolic links: two names of one file must share one lock."""
    located = Path(os.path.realpath(path))
    with failures.translate_sqlite_errors(located):
        if located.is_dir():
            raise InvalidSettings(f"{path} is a directory", hint="name a file in it")
        # SQLite takes an empty file for a new database, and would discard the log beside it.
        if located.exists() and located.stat().st_size == 0:
            raise InvalidSettings(
                f"{path} is empty, and not a Kubelend store",
                hint="restore a backup, or remove the file to start with an empty store",
            )
    return located


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    _sync_directory(directory.parent)


def _acquire_lock(path: Path) -> int:
    """Held by the returned descriptor. The file is not removed: that would race with another opener."""
    lock = os.open(path.with_name(f"{path.name}-lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise StoreFailed(
            f"the store {path} is in use by another broker",
            hint="stop the other broker, or choose another file",
        ) from None
    return lock


def _create_database(path: Path) -> None:
    """Create a database without tables at `path` atomically, so that it is never an empty file."""
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
        timeout=BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENT_CACHE_SIZE,
    )


def _set_pragmas(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
        raise StoreFailed(
            f"the store {path} does not support a write-ahead log", hint="use a local disk"
        )
    for pragma in _PRAGMAS:
        connection.execute(pragma)


def _is_immutable(path: Path) -> bool:
    """A file without a log, in a directory that is not writable: a mounted backup, for example.

    SQLite reads such a file only as immutable.
    """
    log = path.with_name(f"{path.name}-wal")
    return not log.exists() and not os.access(path.parent, os.W_OK)


def _file_identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
