"""Translates errors of SQLite and the operating system to `StoreFailed`, with the file and a hint.

The only place that knows their error codes.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kubelend.core.errors import StoreFailed
from kubelend.stores.records import CorruptRecord


class FailureCause(NamedTuple):
    problem: str
    hint: str


@contextmanager
def translate_sqlite_errors(path: Path) -> Iterator[None]:
    """Errors that mean "this file cannot be used" become `StoreFailed`."""
    try:
        yield
    except CorruptRecord as error:
        raise _store_failure(
            path, FailureCause(f"it is damaged: {error}", _RESTORE_FILE_HINT)
        ) from error
    except UnicodeDecodeError as error:
        # SQLite quotes broken bytes in its message, and Python cannot make a text of it.
        raise _store_failure(path, _CORRUPT) from error
    except sqlite3.Error as error:
        raise _store_failure(path, _sqlite_cause(error)) from error
    except OSError as error:
        raise _store_failure(path, _system_cause(error)) from error


# Otherwise the old log would be replayed into the new file.
_RESTORE_FILE_HINT = "restore a backup, and remove the -wal and -shm files beside the old one"
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


def is_busy_error(error: sqlite3.Error) -> bool:
    """Whether another transaction has locked the file."""
    return _sqlite_code(error) == sqlite3.SQLITE_BUSY


def _store_failure(path: Path, cause: FailureCause) -> StoreFailed:
    return StoreFailed(f"the store {path} cannot be used: {cause.problem}", hint=cause.hint)


def _sqlite_cause(error: sqlite3.Error) -> FailureCause:
    return _SQLITE_CAUSES.get(_sqlite_code(error), FailureCause(str(error), ""))


def _sqlite_code(error: sqlite3.Error) -> int:
    # The low byte is the primary result code; the rest says where in SQLite it arose. Errors of Python's
    # own module have no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code


def _system_cause(error: OSError) -> FailureCause:
    known = _SYSTEM_CAUSES.get(error.errno or 0)
    return known or FailureCause((error.strerror or str(error)).lower(), "check the path")
