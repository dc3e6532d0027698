"""A full disk stops the store with a clear word, loses nothing, and is over when there is space again."""

from contextlib import closing, suppress

import pytest

import make
from disks import mounted
from kubelend.core.errors import StoreFailed
from kubelend.core.models import Reservation, ReservationId
from kubelend.stores import sqlite_file
from kubelend.stores.sqlite import SqliteStore


def commit_until_full(store):
    """Groups of reservations until one is refused; returns what was taken, the revision, and why no more."""
    taken: dict[ReservationId, Reservation] = {}
    for revision in range(1, 1000):
        group = [make.reservation(f"rsv-{revision}-{number}") for number in range(64)]
        try:
            store.commit(group, revision)
        except StoreFailed as problem:
            return taken, revision - 1, str(problem)
        taken |= {found.id: found for found in group}
    pytest.fail("the disk never filled up")


def contents(store):
    loaded = store.load()
    return {found.id: found for found in loaded.reservations}, loaded.revision


def fill(directory):
    """Take all the space that is left, to the last byte."""
    ballast = directory / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ballast


@pytest.fixture
def disk(tmp_path):
    with mounted(tmp_path / "disk", size="8m") as disk:
        yield disk


def test_disk_that_fills_up_loses_nothing_that_was_taken(disk):
    with closing(SqliteStore.open(disk / "store.db")) as store:
        taken, revision, problem = commit_until_full(store)
    assert taken
    assert "the disk is full" in problem
    with closing(SqliteStore.open_readonly(disk / "store.db")) as store:
        assert contents(store) == (taken, revision)


def test_store_on_a_full_disk_does_not_claim_to_be_fine(disk):
    with closing(SqliteStore.open(disk / "store.db")) as store:
        fill(disk)
        with pytest.raises(
            StoreFailed, match=r"store\.db cannot be used: the disk is full; free some"
        ):
            store.load()


def test_store_goes_on_where_it_was_when_there_is_space_again(disk):
    with closing(SqliteStore.open(disk / "store.db")) as store:
        store.commit([make.cluster("a")], 1)
        ballast = fill(disk)
        with pytest.raises(StoreFailed, match="the disk is full"):
            store.commit([make.reservation(f"rsv-{number}") for number in range(5000)], 2)
        ballast.unlink()
        assert store.load()[:3] == ([make.cluster("a")], [], 1)
        store.commit([make.reservation("rsv-1")], 2)
    with closing(SqliteStore.open(disk / "store.db")) as store:
        assert store.load()[:3] == ([make.cluster("a")], [make.reservation("rsv-1")], 2)


def test_new_store_on_a_full_disk_is_refused_and_can_be_made_later(disk):
    ballast = fill(disk)
    with pytest.raises(StoreFailed, match="the disk is full"):
        SqliteStore.open(disk / "store.db").load()
    ballast.unlink()
    with closing(SqliteStore.open(disk / "store.db")) as store:
        assert store.load()[:3] == ([], [], 0)


def test_file_at_its_limit_loses_nothing_and_goes_on_beyond_it(tmp_path):
    """The same without a disk of its own: SQLite itself says that it is full."""
    database = sqlite_file.open_writer(tmp_path / "store.db")
    database.connection.execute("PRAGMA max_page_count = 200")
    with closing(SqliteStore(database)) as store:
        taken, revision, problem = commit_until_full(store)
        assert taken
        assert "the disk is full" in problem
        assert contents(store) == (taken, revision)
        database.connection.execute("PRAGMA max_page_count = 100000")
        more = make.reservation("one more")
        store.commit([more], revision + 1)
        assert contents(store) == (taken | {more.id: more}, revision + 1)
