"""The SQLite store: readable rows, prepared commits, and detection of modified rows."""

import gc
import json
import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

import pytest

import make
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, AuditLogTruncated, ClusterDeleted, RecordDeleted
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId, ReservationId
from kubelend.stores import sqlite_file
from kubelend.stores.sqlite import SMALL_COMMIT_BYTES, SMALL_COMMIT_CHANGES, SqliteStore
from waiting import PATIENCE


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


@pytest.fixture
def store(path):
    with closing(SqliteStore.open(path)) as store:
        store.load()
        yield store


def ended(id, after=make.HOUR):
    return make.reservation(id, phase=Phase.RELEASED, finished_at=make.T0 + after)


def query(path, sql):
    with closing(sqlite3.connect(path)) as shell:
        return shell.execute(sql).fetchall()


def execute(path, sql, *values):
    with closing(sqlite3.connect(path)) as shell, shell:
        shell.execute(sql, values)


def test_rows_are_readable_in_a_shell(path, store):
    store.commit([make.cluster("a", region="eu"), make.reservation("rsv-ä")], 7)
    assert query(path, "SELECT id, phase, record ->> '$.request.requester' FROM reservations") == [
        ("rsv-ä", "Pending", "r")
    ]
    ((name, record),) = query(path, "SELECT id, record FROM clusters")
    assert (name, json.loads(record)["advertisement"]["cluster"]) == ("a", "a")
    assert query(path, "SELECT key, value FROM meta WHERE value") == [("revision", 7)]
    store.commit([ended("rsv-ä")], 8)
    assert query(path, "SELECT phase FROM reservations") == [("Released",)]


def test_archive_is_sorted_by_time_also_below_the_second(path, store):
    moments = [make.HOUR, make.HOUR + make.SECOND / 2, make.HOUR + make.SECOND]
    for number, after in enumerate(moments, start=1):
        store.commit(
            [ended(f"rsv-{number}", after), Archived(ReservationId(f"rsv-{number}"))], number
        )
    found = query(path, "SELECT id, finished_at FROM archive ORDER BY finished_at")
    assert found == [
        ("rsv-1", "2026-01-01T13:00:00.000000+00:00"),
        ("rsv-2", "2026-01-01T13:00:00.500000+00:00"),
        ("rsv-3", "2026-01-01T13:00:01.000000+00:00"),
    ]


def is_being_written(path):
    with closing(sqlite3.connect(path, timeout=0)) as shell:
        try:
            shell.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


@pytest.mark.parametrize(
    "changes, is_written",
    [
        ([make.cluster("b"), make.reservation("rsv-2")], True),
        ([ClusterDeleted(ClusterId("a"))], True),
        ([make.cluster(f"c{number}") for number in range(SMALL_COMMIT_CHANGES)], True),
        ([make.cluster(f"c{number}") for number in range(SMALL_COMMIT_CHANGES + 1)], False),
        ([make.reservation("rsv-2", message="x" * SMALL_COMMIT_BYTES)], False),
        ([make.cluster("b", labels={"x": "x" * SMALL_COMMIT_BYTES})], False),
        ([Archived(ReservationId("rsv-1"))], False),
        ([AuditLogTruncated(1)], False),
        ([RecordDeleted("limits", "a")], False),
    ],
    ids=["plain", "drop", "most", "more", "long", "large", "archive", "cut", "document"],
)
def test_only_a_small_group_is_written_before_its_commit(path, store, changes, is_written):
    store.commit([make.cluster("a"), ended("rsv-1")], 1)
    finish = store.prepare(changes, 2)
    assert is_being_written(path) == is_written
    finish()
    assert not is_being_written(path)
    assert store.load().revision == 2


def test_group_is_prepared_without_waiting_for_another_program(path, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_SECONDS", 3600.0)
    with closing(SqliteStore.open(path)) as store:
        store.load()
        with pytest.raises(StoreFailed, match="cannot be stored"):  # leaves no transaction open
            store.prepare([make.cluster("b"), make.reservation("\ud800")], 1)
        with closing(sqlite3.connect(path, isolation_level=None)) as shell:
            shell.execute("BEGIN IMMEDIATE")
            finish = store.prepare([make.cluster("a")], 1)
            shell.execute("ROLLBACK")
        finish()
        assert [found.id for found in store.load().clusters] == ["a"]


def test_group_that_could_not_be_prepared_waits_for_another_program(path, store):
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as shell,
        ThreadPoolExecutor() as pool,
    ):
        shell.execute("BEGIN IMMEDIATE")
        finished = pool.submit(store.prepare([make.cluster("a")], 1))
        wait([finished], timeout=0.1)
        assert not finished.done()
        shell.execute("ROLLBACK")
        finished.result(timeout=PATIENCE)
    assert [found.id for found in store.load().clusters] == ["a"]


def test_reader_loads_what_the_writer_has_committed_and_cannot_commit(path, store):
    store.commit([make.cluster("a"), ended("rsv-1")], 1)
    store.commit([Archived(ReservationId("rsv-1"))], 2)
    with closing(SqliteStore.open_readonly(path)) as reader:
        assert reader.load()[:3] == ([make.cluster("a")], [], 2)
        assert reader.archived(ReservationId("rsv-1")) == ended("rsv-1")
        store.commit([make.cluster("b")], 3)
        assert reader.load().revision == 3
        with pytest.raises(StoreFailed, match="read-only"):
            reader.commit([make.cluster("c")], 4)


def test_loading_leaves_the_garbage_collector_as_it_was(store):
    assert gc.isenabled()
    store.load()
    assert gc.isenabled()
    gc.disable()
    try:
        store.load()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "statement, error",
    [
        ("UPDATE reservations SET record = replace(record, '1000', '9000')", "'rsv-1' .* checksum"),
        ("UPDATE reservations SET id = 'rsv-2'", "'rsv-2' .* checksum"),
        (
            "INSERT INTO reservations SELECT number + 1, id, phase, checksum, record FROM reservations",
            "contains reservation 'rsv-1' twice",
        ),
        ("UPDATE clusters SET checksum = checksum + 1", "'a' .* checksum"),
        ("UPDATE clusters SET record = '', checksum = 0", "'a' .* checksum"),
        ("UPDATE meta SET value = value - 1", "revision .* checksum"),
        ("DELETE FROM meta", "revision .* checksum"),
        ("DROP TABLE reservations", "no such table"),
    ],
)
def test_modified_rows_fail_the_load(path, store, statement, error):
    store.commit([make.cluster("a"), make.reservation("rsv-1")], 5)
    execute(path, statement)
    with pytest.raises(StoreFailed, match=rf"store\.db .*{error}"):
        store.load()


def test_modified_record_is_not_archived_and_is_reported_when_read(path, store):
    store.commit([ended("rsv-1"), ended("rsv-2"), Archived(ReservationId("rsv-1"))], 2)
    for table in ("archive", "reservations"):
        execute(path, f"UPDATE {table} SET record = replace(record, '1000', '9000')")
    with pytest.raises(StoreFailed, match=r"'rsv-1' .* checksum; restore a backup"):
        store.archived(ReservationId("rsv-1"))
    with pytest.raises(StoreFailed, match=r"'rsv-2' .* checksum"):
        store.commit([Archived(ReservationId("rsv-2"))], 3)
    plan = query(path, "EXPLAIN QUERY PLAN DELETE FROM archive WHERE finished_at < '2030'")
    assert "archive_by_finish" in plan[0][3], "what has expired is found by an index"


# -- commits that are lost


@pytest.fixture
def killed(path, tmp_path):
    """The files of a broker that was killed after ten commits, all of them in the log alone."""
    copy = tmp_path / "killed"
    SqliteStore.open(path).close()  # the tables are not in the log
    with closing(SqliteStore.open(path)) as store:
        store.load()
        for number in range(1, 11):
            store.commit([make.reservation(f"r{number}")], number)
        shutil.copytree(path.parent, copy, ignore=shutil.ignore_patterns("killed"))
    return copy / path.name


def log_of(path):
    return path.with_name(f"{path.name}-wal")


def flip_a_bit(path):
    content = bytearray(log_of(path).read_bytes())
    content[len(content) // 2] ^= 1
    log_of(path).write_bytes(content)


def cut_the_log(path):
    os.truncate(log_of(path), log_of(path).stat().st_size // 2)


def remove_the_log(path):
    log_of(path).unlink()


@pytest.mark.parametrize("damage", [flip_a_bit, cut_the_log, remove_the_log])
@pytest.mark.parametrize("open_store", [SqliteStore.open, SqliteStore.open_readonly])
def test_store_that_ends_before_its_last_commit_does_not_load(killed, damage, open_store):
    """SQLite takes a log for complete that ends at a damaged frame."""
    damage(killed)
    lost = r"it ends at revision \d, but revision 10 was committed"
    with closing(open_store(killed)) as store, pytest.raises(StoreFailed, match=lost):
        store.load()


def test_lost_commits_are_given_up_by_removing_the_lock_file(killed):
    cut_the_log(killed)
    killed.with_name("store.db-lock").unlink()
    with closing(SqliteStore.open(killed)) as store:
        assert 0 < store.load().revision < 10


def test_all_of_the_log_is_written_again_when_the_store_is_opened(killed, tmp_path):
    """A failed sync may have left it in the kernel's cache alone."""
    with closing(SqliteStore.open(killed)):
        assert log_of(killed).stat().st_size == 0
        alone = tmp_path / "alone.db"
        shutil.copy(killed, alone)
    with closing(SqliteStore.open_readonly(alone)) as store:
        assert store.load().revision == 10


def test_store_that_another_program_reads_is_not_opened_before_it_is_synced(killed, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_SECONDS", 0)
    with closing(SqliteStore.open(killed)) as store:
        store.load()
        with closing(sqlite3.connect(killed)) as shell:
            shell.execute("BEGIN")
            shell.execute("SELECT * FROM meta").fetchall()
            store.commit([make.reservation("late")], 11)
            store.close()
            with pytest.raises(StoreFailed, match="is being read by another program"):
                SqliteStore.open(killed)
    with closing(SqliteStore.open(killed)) as store:
        assert store.load().revision == 11


def test_lost_store_is_not_replaced_by_an_empty_one(path, store):
    store.commit([make.reservation("r")], 1)
    store.close()
    path.unlink()
    missing = r"store\.db was in use, and is missing; move it back.* remove store\.db-lock"
    with pytest.raises(StoreFailed, match=missing):
        SqliteStore.open(path)
    assert not path.exists()
    path.with_name("store.db-lock").unlink()
    with closing(SqliteStore.open(path)) as new:
        assert new.load().revision == 0


def test_store_whose_last_revision_is_unknown_does_not_load(path, store):
    path.with_name("store.db-lock").write_text("seven")
    with pytest.raises(StoreFailed, match=r"store\.db-lock does not contain a revision"):
        store.load()
