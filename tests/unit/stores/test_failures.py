"""Each way in which a file can fail, as a person reads it."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from kubelend.core.errors import InvalidSettings, StoreFailed
from kubelend.stores import sqlite_file
from kubelend.stores.batch import CorruptRecord


def sqlite_error(code, message="as SQLite says it"):
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = code
    return error


def system_error(code):
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    "error, said",
    [
        (sqlite_error(sqlite3.SQLITE_FULL), "the disk is full; free some space there"),
        (sqlite_error(sqlite3.SQLITE_READONLY), "it is read-only; check the owner"),
        (sqlite_error(sqlite3.SQLITE_READONLY_DIRECTORY), "it is read-only; check the owner"),
        (sqlite_error(sqlite3.SQLITE_CORRUPT), "it is damaged; restore a backup"),
        (sqlite_error(sqlite3.SQLITE_CORRUPT_INDEX), "it is damaged; restore a backup"),
        (
            sqlite_error(sqlite3.SQLITE_NOTADB),
            "it is not a database, or damaged; choose another file, or restore a backup",
        ),
        (sqlite_error(sqlite3.SQLITE_BUSY), "it is locked by another program; stop that program"),
        (sqlite_error(sqlite3.SQLITE_CANTOPEN), "it cannot be opened; check the owner"),
        (
            sqlite_error(sqlite3.SQLITE_IOERR_FSYNC),
            "reading or writing the disk failed; check the disk",
        ),
        (sqlite_error(sqlite3.SQLITE_ERROR), "as SQLite says it"),
        (sqlite3.ProgrammingError("as Python says it"), "as Python says it"),
        (CorruptRecord("page 7"), "it is damaged: page 7; restore a backup"),
        (UnicodeDecodeError("utf-8", b"\xcf", 0, 1, "no"), "it is damaged; restore a backup"),
        (system_error(errno.ENOSPC), "the disk is full; free some space there"),
        (system_error(errno.EDQUOT), "the disk is full; free some space there"),
        (system_error(errno.EROFS), "it is read-only; check the owner"),
        (system_error(errno.EACCES), "access is denied; check the owner"),
        (system_error(errno.ENOENT), "the file does not exist; check the path"),
        (system_error(errno.EIO), "input/output error; check the path"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value),
)
def test_failure_becomes_a_sentence_with_the_path_and_what_to_do(error, said):
    with (
        pytest.raises(StoreFailed) as failed,
        sqlite_file.translate_sqlite_errors(Path("/var/store.db")),
    ):
        raise error
    assert str(failed.value).startswith(f"the store /var/store.db cannot be used: {said}")
    assert failed.value.__cause__ is error


@pytest.mark.parametrize("error", [InvalidSettings("ours"), KeyError("a mistake")], ids=repr)
def test_other_errors_pass_through(error):
    with (
        pytest.raises(type(error)) as passed,
        sqlite_file.translate_sqlite_errors(Path("/var/store.db")),
    ):
        raise error
    assert passed.value is error
