"""One SQLite file: creation, lock, migrations, transactions and errors. Independent of the records.

The broker opens it with `open_writer`, which takes an exclusive `flock` on a file beside it; the kernel
releases the lock when the process ends. SQLite's own locks would also keep `open_reader` from reading
beside a running broker.

The lock file also records the last durable revision. SQLite ends its log silently at the first damaged
frame, and creates a database where one is missing; with the recorded revision neither goes unnoticed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from kubelend.core.errors import InvalidSettings, StoreFailed
from kubelend.kits import files as kits_files
from kubelend.stores.batch import CorruptRecord


class FailureCause(NamedTuple):
    problem: str
    hint: str


@contextmanager
def translate_sqlite_errors(path: Path) -> Iterator[None]:
    """Errors that mean "this file cannot be used" become `StoreFailed`."""
    try:
        yield
    except (CorruptRecord, UnicodeDecodeError, sqlite3.Error, OSError) as error:
        cause = _failure_cause(error)
        message = f"the store {path} cannot be used: {cause.problem}"
        raise StoreFailed(message, hint=cause.hint) from error


def _failure_cause(error: Exception) -> FailureCause:
    match error:
        case CorruptRecord():
            return FailureCause(f"it is damaged: {error}", _RESTORE_FILE_HINT)
        case UnicodeDecodeError():
            # SQLite quotes broken bytes in its message, and Python cannot make a text of it.
            return _CORRUPT
        case OSError(errno=number, strerror=text):
            unknown = FailureCause((text or str(error)).lower(), "check the path")
            return _SYSTEM_CAUSES.get(number or 0, unknown)
        case _:
            return _SQLITE_CAUSES.get(_sqlite_code(error), FailureCause(str(error), ""))


# Otherwise the old log would be replayed into the new file.
_RESTORE_FILE_HINT = (
    "restore a backup, and remove the -wal, -shm and -lock files beside the old one"
)
_PERMISSIONS_HINT = "check the owner and mode of the file and its directory"
_CORRUPT = FailureCause("it is damaged", _RESTORE_FILE_HINT)
_DISK_FULL = FailureCause("the disk is full", "free some space there")
_READ_ONLY = FailureCause("it is read-only", _PERMISSIONS_HINT)

_SQLITE_CAUSES = {
    sqlite3.SQLITE_FULL: _DISK_FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_CORRUPT: _CORRUPT,
    sqlite3.SQLITE_NOTADB: FailureCause(
        "it is not a database, or damaged", "choose another file, or restore a backup"
    ),
    sqlite3.SQLITE_BUSY: FailureCause("it is locked by another program", "stop that program"),
    sqlite3.SQLITE_CANTOPEN: FailureCause("it cannot be opened", _PERMISSIONS_HINT),
    sqlite3.SQLITE_PERM: FailureCause("it cannot be opened", _PERMISSIONS_HINT),
    sqlite3.SQLITE_IOERR: FailureCause("reading or writing the disk failed", "check the disk"),
}

_SYSTEM_CAUSES = {
    errno.ENOSPC: _DISK_FULL,
    errno.EDQUOT: _DISK_FULL,
    errno.EROFS: _READ_ONLY,
    errno.EACCES: FailureCause("access is denied", _PERMISSIONS_HINT),
    errno.ENOENT: FailureCause("the file does not exist", "check the path"),
}


def _sqlite_code(error: Exception) -> int:
    # The low byte is the primary result code; the rest says where in SQLite it arose. Errors of Python's
    # own module have no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code


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
    (
        "ALTER TABLE journal RENAME TO audit_log",
        "UPDATE meta SET key = 'audit log start' WHERE key = 'journal start'",
    ),
)


def check_schema_version(
    connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]
) -> int:
    """Reject a file that is not a Kubelend store, or of an unknown schema version.

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
        with translate_sqlite_errors(self.path):
            self._check_not_replaced()
            self._set_busy_timeout(BUSY_TIMEOUT_SECONDS)
            self.connection.execute(f"BEGIN {kind}")
        with self.rollback_on_error() as connection:
            yield connection
            connection.execute("COMMIT")

    def try_begin(self) -> bool:
        """Begin a write transaction without waiting; False if another one is open. Call `commit` later."""
        with translate_sqlite_errors(self.path):
            self._check_not_replaced()
            self._set_busy_timeout(0)
            try:
                self.connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if _sqlite_code(error) == sqlite3.SQLITE_BUSY:
                    return False
                raise
        return True

    @contextmanager
    def rollback_on_error(self) -> Iterator[sqlite3.Connection]:
        """A part of an open transaction: an error rolls all of it back."""
        with translate_sqlite_errors(self.path):
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

    def record_revision(self, revision: int) -> None:
        """Record a durable revision in the lock file. Not synced: the kernel writes it within a minute."""
        if self._lock is not None:
            with translate_sqlite_errors(self.path):
                write_revision(self._lock, revision)

    def recorded_revision(self) -> int:
        """Returns the last revision that is known to be durable; 0 if none is recorded."""
        with translate_sqlite_errors(self.path):
            return _recorded_revision(self.path)

    def check_free_space(self) -> None:
        """Fail now if the next commit would, for lack of space or permission."""
        with (
            translate_sqlite_errors(self.path),
            tempfile.TemporaryFile(dir=self.path.parent) as file,
        ):
            file.write(bytes(MIN_FREE_BYTES))
            file.flush()

    def close(self) -> None:
        """Close the file, then release the lock. Idempotent."""
        with translate_sqlite_errors(self.path):
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
        """A file that was deleted or replaced still accepts writes, which could never be read."""
        if _file_identity(self.path) != self._identity:
            raise StoreFailed(
                f"the store {self.path} was replaced while in use", hint="restart the broker"
            )


def open_writer(
    path: Path, migrations: Sequence[Migration] = MIGRATIONS, *, may_create: bool = True
) -> SqliteFile:
    """Open a file for its only writer; migrated if old, and created if there never was one."""
    path = _resolve_path(path)
    with translate_sqlite_errors(path), ExitStack() as undo:
        if not path.exists() and (_recorded_revision(path) or not may_create):
            raise _missing_store(path)
        _make_directory(path.parent)
        lock = _acquire_lock(path)
        undo.callback(os.close, lock)
        if not path.exists():
            _create_database(path)
        connection = _connect(path, "rw")
        undo.callback(connection.close)
        version = check_schema_version(connection, path, migrations)
        _set_pragmas(connection, path)
        _checkpoint(connection, path)
        apply_migrations(connection, version, migrations)
        database = SqliteFile(path, connection, lock)
        undo.pop_all()
        return database


def open_reader(path: Path, migrations: Sequence[Migration] = MIGRATIONS) -> SqliteFile:
    """Open a file for reading only; a broker may be using it."""
    path = _resolve_path(path)
    with translate_sqlite_errors(path), ExitStack() as undo:
        if not path.exists():
            raise InvalidSettings(f"the store {path} does not exist", hint="check the path")
        connection = _connect(path, "ro&immutable=1" if _is_immutable(path) else "ro")
        undo.callback(connection.close)
        if check_schema_version(connection, path, migrations) < len(migrations):
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
    open_files = [kits_files.mode_problem(file, content="the ledger") for file in files]
    found = [f"{problem}; chmod 600 {located}*" for problem in open_files if problem][:1]
    return [*found, *filter(None, [kits_files.directory_mode_problem(located.parent)])]


def _resolve_path(path: Path) -> Path:
    """Resolves symbolic links: two names of one file must share one lock."""
    located = Path(os.path.realpath(path))
    with translate_sqlite_errors(located):
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
    kits_files.sync_directory(directory.parent)


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-lock")


def _recorded_revision(path: Path) -> int:
    try:
        return int(_lock_path(path).read_bytes() or 0)
    except FileNotFoundError:
        return 0
    except ValueError:
        raise CorruptRecord(f"{_lock_path(path).name} does not contain a revision") from None


def _missing_store(path: Path) -> StoreFailed:
    """A new store in its place would promise again what is promised already."""
    return StoreFailed(
        f"the store {path} was in use, and is missing",
        hint="move it back, or restore a backup; to start with an empty store, stop the broker"
        f" and remove {_lock_path(path).name}",
    )


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Lock a store that is not opened, as a broker does; yields the descriptor of the lock file."""
    with translate_sqlite_errors(path):
        lock = _acquire_lock(path)
    try:
        yield lock
    finally:
        os.close(lock)


def write_revision(lock: int, revision: int) -> None:
    """Record a revision in the lock file: a store that ends before it has lost commits."""
    os.pwrite(lock, b"%020d\n" % revision, 0)


def _acquire_lock(path: Path) -> int:
    """Held by the returned descriptor. The file is not removed: that would race with another opener."""
    lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT, 0o600)
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
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID:d}")
    fresh.rename(path)
    kits_files.sync_directory(path.parent)


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


def _checkpoint(connection: sqlite3.Connection, path: Path) -> None:
    """Write all of the log to the file again, and sync it.

    After a failed sync the kernel takes pages for written that may never reach the disk, and the log
    looks complete as long as they are cached. Only what was written and synced again is durable.
    """
    is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if is_busy:
        raise StoreFailed(
            f"the store {path} is being read by another program", hint="wait for it, or stop it"
        )


def _is_immutable(path: Path) -> bool:
    """A file without a log, in a directory that is not writable: a mounted backup, for example.

    SQLite reads such a file only as immutable.
    """
    log = path.with_name(f"{path.name}-wal")
    return not log.exists() and not os.access(path.parent, os.W_OK)


def _file_identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
