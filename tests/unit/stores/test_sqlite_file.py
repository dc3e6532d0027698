"""The SQLite file: creation, lock, migrations, transactions, and its failures in words."""

import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from disks import mounted
from kubelend.core.errors import InvalidSettings, KubelendError, StoreFailed
from kubelend.stores import sqlite_file
from kubelend.stores.batch import CorruptRecord

EXTRA = ("CREATE TABLE extra (x)", "INSERT INTO extra VALUES (1)")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


@pytest.fixture
def made(path):
    """A store's file that was opened and closed."""
    sqlite_file.open_writer(path).close()
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def pragma(database, name):
    return database.connection.execute(f"PRAGMA {name}").fetchone()[0]


def open_files():
    return {found.name for found in Path("/proc/self/fd").iterdir()}


def directory_contents(path):
    return {found.name: found.read_bytes() for found in path.parent.iterdir()}


# -- creation


def test_file_and_missing_directories_are_created_for_their_owner_only(tmp_path):
    """Whatever the umask; a directory that is there keeps its mode."""
    path = tmp_path / "var" / "lib" / "store.db"
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        with closing(sqlite_file.open_writer(path)) as database:
            set_value(database, 1)
            files = ("store.db", "store.db-lock", "store.db-shm", "store.db-wal")
            modes = {found.name: mode(found) for found in path.parent.iterdir()}
            assert modes == dict.fromkeys(files, 0o600)
    finally:
        os.umask(before)
    assert mode(tmp_path / "var") == mode(tmp_path / "var" / "lib") == 0o700
    assert mode(tmp_path) == 0o755


def test_leftovers_of_an_interrupted_creation_are_replaced(path):
    path.with_name("store.db-new").write_bytes(b"half a pa")
    sqlite_file.open_writer(path).close()
    assert {found.name for found in path.parent.iterdir()} == {"store.db", "store.db-lock"}


def test_special_characters_in_file_names_work(tmp_path):
    path = tmp_path / "a ?mode=memory#%20ü'.db"
    sqlite_file.open_writer(path).close()
    sqlite_file.open_reader(path).close()
    assert path.stat().st_size > 0


# -- pragmas and the write-ahead log


@pytest.mark.parametrize(
    "name, value",
    [
        ("journal_mode", "wal"),
        ("synchronous", 2),
        ("application_id", sqlite_file.APPLICATION_ID),
        ("user_version", len(sqlite_file.MIGRATIONS)),
        ("wal_autocheckpoint", 1000),
        ("journal_size_limit", 16 * 2**20),
        ("cell_size_check", 1),
        ("cache_spill", 0),
        ("temp_store", 2),
    ],
)
@pytest.mark.parametrize("opened", ["first", "again"])
def test_pragmas_are_in_force(path, opened, name, value):
    if opened == "again":
        sqlite_file.open_writer(path).close()
    with closing(sqlite_file.open_writer(path)) as database:
        assert pragma(database, name) == value


def test_large_transaction_is_written_only_by_its_commit(path):
    """Not even into a log that has just begun anew: SQLite would wait for the disk then."""
    log = path.with_name("store.db-wal")
    with closing(sqlite_file.open_writer(path)) as database:
        set_value(database, 1)
        database.connection.execute("PRAGMA wal_checkpoint(RESTART)")
        before = log.read_bytes()
        assert database.try_begin()
        for number in range(1_000):
            row = (f"c{number}", 0, "x" * 10_000)
            database.connection.execute("INSERT INTO clusters VALUES (?, ?, ?)", row)
        assert log.read_bytes() == before
        database.commit()
        assert log.read_bytes() != before


@pytest.mark.parametrize(
    "size, times, limit", [(1_000_000, 60, 12 * 2**20), (40_000_000, 1, 16 * 2**20)]
)
def test_log_size_is_bounded_after_many_commits_and_after_a_large_one(path, size, times, limit):
    with closing(sqlite_file.open_writer(path)) as database:
        database.connection.execute("CREATE TABLE filler (x)")
        for _ in range(times):
            with database.transaction("IMMEDIATE") as connection:
                connection.execute("DELETE FROM filler")
                connection.execute(f"INSERT INTO filler VALUES (randomblob({size}))")
        set_value(database, 1)
        assert path.with_name("store.db-wal").stat().st_size <= limit


# -- the lock


def test_second_writer_is_rejected_until_the_first_has_closed(tmp_path, made):
    """Under another name too, and whichever thread closes it; a reader takes no lock."""
    link = tmp_path / "link.db"
    link.symlink_to(made)
    with closing(sqlite_file.open_reader(made)) as reader:
        first = sqlite_file.open_writer(made)
        assert (reader.is_writable, first.is_writable) == (False, True)
    for name in (made, made, link):  # a rejected writer does not release the lock of the first
        with pytest.raises(StoreFailed, match=r"\.db is in use by another broker"):
            sqlite_file.open_writer(name)
    user = threading.Thread(target=first.close)
    user.start()
    user.join()
    with pytest.raises(StoreFailed, match="closed"), first.transaction("DEFERRED"):
        pass
    sqlite_file.open_writer(made).close()


@pytest.mark.parametrize("why", ["in use", "newer", "no database"])
def test_failed_opening_leaves_no_file_open(made, why):
    with ExitStack() as held:
        if why == "in use":
            held.enter_context(closing(sqlite_file.open_writer(made)))
        elif why == "no database":
            made.write_bytes(b"x" * 5000)
        before = open_files()
        with pytest.raises(KubelendError):
            sqlite_file.open_writer(made, () if why == "newer" else sqlite_file.MIGRATIONS)
        assert open_files() == before
    if why == "newer":
        sqlite_file.open_writer(made).close()  # the lock is free again


# -- migrations


def test_old_file_is_migrated_once_and_keeps_its_rows(made):
    with closing(sqlite_file.open_writer(made)) as database:
        database.connection.execute("INSERT INTO clusters VALUES ('a', 1, '{}')")
    for _ in range(2):
        with closing(sqlite_file.open_writer(made, (*sqlite_file.MIGRATIONS, EXTRA))) as database:
            assert pragma(database, "user_version") == len(sqlite_file.MIGRATIONS) + 1
            rows = database.connection.execute("SELECT clusters.id, x FROM clusters, extra")
            assert rows.fetchall() == [("a", 1)]


def test_failed_migration_is_rolled_back_and_earlier_ones_stay(made):
    broken = ("CREATE TABLE other (x)", "INSERT INTO nowhere VALUES (1)")
    with pytest.raises(StoreFailed, match="no such table: nowhere"):
        sqlite_file.open_writer(made, (*sqlite_file.MIGRATIONS, EXTRA, broken))
    with closing(sqlite_file.open_writer(made, (*sqlite_file.MIGRATIONS, EXTRA))) as database:
        assert pragma(database, "user_version") == len(sqlite_file.MIGRATIONS) + 1
        tables = {name for (name,) in database.connection.execute("SELECT name FROM sqlite_schema")}
    assert "extra" in tables
    assert "other" not in tables


@pytest.mark.parametrize("opener", [sqlite_file.open_writer, sqlite_file.open_reader])
def test_file_of_a_newer_version_is_rejected_unchanged(made, opener):
    sqlite_file.open_writer(made, (*sqlite_file.MIGRATIONS, EXTRA)).close()
    before = directory_contents(made)
    with pytest.raises(
        InvalidSettings, match=r"store\.db has schema version 5, .*supports up to 4"
    ):
        opener(made)
    assert directory_contents(made)["store.db"] == before["store.db"]


def test_reader_does_not_migrate(made):
    with pytest.raises(InvalidSettings, match="older version; start a broker"):
        sqlite_file.open_reader(made, (*sqlite_file.MIGRATIONS, EXTRA))
    with closing(sqlite_file.open_reader(made)) as database:
        assert pragma(database, "user_version") == len(sqlite_file.MIGRATIONS)


# -- other files


def foreign_database(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE accounts (x)")


OTHER_FILES = {
    "text": lambda path: path.write_text("not a database, but a text\n" * 100),
    "one byte": lambda path: path.write_bytes(b"x"),
    "zeros": lambda path: path.write_bytes(bytes(8192)),
    "empty": lambda path: path.touch(),
    "another program's database": foreign_database,
    "directory": lambda path: path.mkdir(),
    "below a file": lambda path: path.parent.joinpath("store.db").symlink_to("/dev/null/x"),
}


def test_reader_needs_a_file(path):
    with pytest.raises(InvalidSettings, match=r"store\.db does not exist"):
        sqlite_file.open_reader(path)
    assert not path.exists()


@pytest.mark.parametrize("opener", [sqlite_file.open_writer, sqlite_file.open_reader])
@pytest.mark.parametrize("content", OTHER_FILES)
def test_file_that_is_no_store_is_rejected_unchanged(path, content, opener):
    OTHER_FILES[content](path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(KubelendError) as refused:
        opener(path)
    assert isinstance(refused.value, InvalidSettings | StoreFailed)
    assert "store.db" in str(refused.value) or "/dev/null/x" in str(refused.value)
    assert refused.value.hint
    assert before == (path.read_bytes() if path.is_file() else None)


def test_log_beside_an_empty_file_is_not_deleted(made):
    made.write_bytes(b"")
    log = made.with_name("store.db-wal")
    log.write_bytes(b"precious")
    with pytest.raises(InvalidSettings, match="is empty"):
        sqlite_file.open_writer(made)
    assert log.read_bytes() == b"precious"


# -- readers


def test_reader_sees_one_snapshot_per_transaction_and_cannot_write(made):
    with (
        closing(sqlite_file.open_writer(made)) as writer,
        closing(sqlite_file.open_reader(made)) as reader,
    ):
        query = "SELECT value FROM meta"
        with reader.transaction("DEFERRED") as connection:
            assert connection.execute(query).fetchone() == (0,)
            set_value(writer, 1)
            assert connection.execute(query).fetchone() == (0,)
        with reader.transaction("DEFERRED") as connection:
            assert connection.execute(query).fetchone() == (1,)
        with pytest.raises(StoreFailed, match="read-only"):
            set_value(reader, 2)


def test_copy_on_a_read_only_disk_can_be_read(tmp_path, made):
    with mounted(tmp_path / "backup") as backup:
        shutil.copy(made, backup)
        subprocess.run(["mount", "-o", "remount,ro", backup], check=True)
        with closing(sqlite_file.open_reader(backup / "store.db")) as reader:
            assert pragma(reader, "user_version") == len(sqlite_file.MIGRATIONS)
        with pytest.raises(StoreFailed, match="read-only"):
            sqlite_file.open_writer(backup / "store.db")


# -- transactions


def set_value(database, value, *, then_raise=None):
    with database.transaction("IMMEDIATE") as connection:
        connection.execute("UPDATE meta SET value = ?", (value,))
        if then_raise is not None:
            raise then_raise


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine")], ids=repr)
def test_error_in_a_transaction_rolls_it_back_and_is_raised(made, error):
    with closing(sqlite_file.open_writer(made)) as database:
        with pytest.raises(type(error)):
            set_value(database, 7, then_raise=error)
        assert database.connection.execute("SELECT value FROM meta").fetchone() == (0,)
        set_value(database, 8)
        assert database.connection.execute("SELECT value FROM meta").fetchone() == (8,)


def test_file_locked_by_another_program_is_reported(made):
    with (
        closing(sqlite_file.open_writer(made)) as database,
        closing(sqlite3.connect(made)) as shell,
    ):
        database.connection.execute("PRAGMA busy_timeout = 10")
        shell.execute("BEGIN IMMEDIATE")
        reported = pytest.raises(StoreFailed, match=r"store\.db .* locked")
        with reported, database.transaction("IMMEDIATE"):
            pass
        shell.rollback()
        with database.transaction("IMMEDIATE"):
            pass


@pytest.mark.parametrize("replacement", [None, b"another file"])
def test_replaced_file_is_detected_before_a_write(made, replacement):
    with closing(sqlite_file.open_writer(made)) as database:
        made.rename(made.with_name("moved.db"))
        if replacement is not None:
            made.write_bytes(replacement)
        with pytest.raises(StoreFailed, match=r"store\.db"), database.transaction("IMMEDIATE"):
            pytest.fail("a transaction began")


# -- failures


def sqlite_error(code, message="as SQLite says it"):
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = code
    return error


def translated():
    return sqlite_file.translate_sqlite_errors(Path("/var/store.db"))


def system_error(code):
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    "error, text",
    [
        (sqlite_error(sqlite3.SQLITE_FULL), "the disk is full; free some space there"),
        (sqlite_error(sqlite3.SQLITE_READONLY), "it is read-only; check the owner"),
        (sqlite_error(sqlite3.SQLITE_READONLY_DIRECTORY), "it is read-only; check the owner"),
        (sqlite_error(sqlite3.SQLITE_CORRUPT), "it is damaged; restore a backup"),
        (sqlite_error(sqlite3.SQLITE_CORRUPT_INDEX), "it is damaged; restore a backup"),
        (sqlite_error(sqlite3.SQLITE_NOTADB), "it is not a database, or damaged; choose another"),
        (sqlite_error(sqlite3.SQLITE_BUSY), "it is locked by another program; stop that program"),
        (sqlite_error(sqlite3.SQLITE_CANTOPEN), "it cannot be opened; check the owner"),
        (sqlite_error(sqlite3.SQLITE_IOERR_FSYNC), "reading or writing the disk failed; check"),
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
def test_failure_has_the_path_the_cause_and_a_hint(error, text):
    with pytest.raises(StoreFailed) as failed, translated():
        raise error
    assert str(failed.value).startswith(f"the store /var/store.db cannot be used: {text}")
    assert failed.value.__cause__ is error


@pytest.mark.parametrize("error", [InvalidSettings("ours"), KeyError("a mistake")], ids=repr)
def test_other_errors_pass_through(error):
    with pytest.raises(type(error)) as passed, translated():
        raise error
    assert passed.value is error
