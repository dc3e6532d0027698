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
from kubelend.stores.records import Damaged


class Cause(NamedTuple):
    what: str
    hint: str


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Errors that mean "this file cannot be used" become `StoreFailed`."""
    try:
        yield
    except Damaged as error:
        raise _failure(path, Cause(f"it is damaged: {error}", _RESTORE)) from error
    except UnicodeDecodeError as error:
        # SQLite quotes broken bytes in its message, and Python cannot make a text of it.
        raise _failure(path, _DAMAGED) from error
    except sqlite3.Error as error:
        raise _failure(path, _cause(error)) from error
    except OSError as error:
        raise _failure(path, _system_cause(error)) from error


# Otherwise the old log would be replayed into the new file.
_RESTORE = "restore a backup, and remove the -wal and -shm files beside the old one"
_PERMISSIONS = "check the owner and mode of the file and its directory"
_DAMAGED = Cause("it is damaged", _RESTORE)
_SPACE = Cause("the disk is full", "free some space there")
_READ_ONLY = Cause("it is read-only", _PERMISSIONS)

_CAUSES = {
    sqlite3.SQLITE_FULL: _SPACE,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: Cause(
        "it is not a database, or damaged", "choose another file, or restore a backup"
    ),
    sqlite3.SQLITE_BUSY: Cause("it is locked by another program", "stop that program"),
    sqlite3.SQLITE_CANTOPEN: Cause("it cannot be opened", _PERMISSIONS),
    sqlite3.SQLITE_PERM: Cause("it cannot be opened", _PERMISSIONS),
    sqlite3.SQLITE_IOERR: Cause("reading or writing the disk failed", "check the disk"),
}

_SYSTEM_CAUSES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EROFS: _READ_ONLY,
    errno.EACCES: Cause("access is denied", _PERMISSIONS),
    errno.ENOENT: Cause("the file does not exist", "check the path"),
}


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another transaction has locked the file."""
    return _code(error) == sqlite3.SQLITE_BUSY


def _failure(path: Path, cause: Cause) -> StoreFailed:
    return StoreFailed(f"the store {path} cannot be used: {cause.what}", hint=cause.hint)


def _cause(error: sqlite3.Error) -> Cause:
    return _CAUSES.get(_code(error), Cause(str(error), ""))


def _code(error: sqlite3.Error) -> int:
    # The low byte is the primary result code; the rest says where in SQLite it arose. Errors of Python's
    # own module have no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code


def _system_cause(error: OSError) -> Cause:
    known = _SYSTEM_CAUSES.get(error.errno or 0)
    return known or Cause((error.strerror or str(error)).lower(), "check the path")
