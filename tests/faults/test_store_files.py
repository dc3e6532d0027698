"""Files of the SQLite store after kills, on full disks and with damage: nothing is lost or read wrongly."""

import itertools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import make
from disks import mounted
from faults import committing
from kubelend.core import audit
from kubelend.core.errors import InvalidSettings, StoreFailed
from kubelend.core.events import Archived, WorkingSet
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.core.models import Reservation, ReservationId
from kubelend.stores import sqlite_file
from kubelend.stores.sqlite import SqliteStore

# -- kills


@contextmanager
def committer(path):
    command = [sys.executable, committing.__file__, path]
    # The very code that this process runs, wherever it was imported from.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def acknowledge(process, times):
    """Wait until the process has said so many times that something is durable."""
    lines = list(itertools.islice(process.stdout, times))
    assert len(lines) == times, "the committing process ended by itself"
    return int(lines[-1])


def kill(process, within=0.0):
    """Kill it without a warning; returns the last revision that it acknowledged, if it said more.

    Not at once: just after a line it is always between two commits, and the moments inside one count.
    """
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=within)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split("\n")[:-1]
    process.wait()
    return max(map(int, rest), default=0)


def loaded(opened):
    with closing(opened) as store:
        return store.load()


def live_again(start, revision):
    """The ledger that the committing process had at a revision, worked out anew."""
    return next(
        runner.ledger for runner in committing.history(start) if runner.ledger.revision >= revision
    )


@pytest.mark.timeout(180)
def test_kill_at_a_random_moment_loses_no_acknowledged_commit(tmp_path):
    path, dice, start = tmp_path / "store.db", random.Random(), WorkingSet([], [], 0)
    for _ in range(10):
        with committer(path) as process:
            acknowledged = acknowledge(process, dice.randint(1, 150))
            acknowledged = max(acknowledged, kill(process, within=dice.uniform(0, 0.02)))
        found = loaded(SqliteStore.open(path))
        assert found.revision >= acknowledged
        assert audit.invariant_violations(Ledger.restore(found)) == []
        assert make.state(Ledger.restore(found)) == make.state(live_again(start, found.revision))
        start = found
    with closing(sqlite3.connect(path)) as shell:
        assert shell.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_file_of_a_killed_process_can_be_read_before_it_is_reopened(tmp_path):
    path = tmp_path / "store.db"
    with committer(path) as process:
        acknowledged = max(acknowledge(process, 50), kill(process))
    found = loaded(SqliteStore.open_readonly(path))
    assert found.revision >= acknowledged
    again = loaded(SqliteStore.open(path))
    assert make.state(Ledger.restore(again)) == make.state(Ledger.restore(found))


def test_running_process_excludes_writers_but_not_readers(tmp_path):
    path, nothing = tmp_path / "store.db", WorkingSet([], [], 0)
    with committer(path) as process:
        acknowledge(process, 20)
        with pytest.raises(StoreFailed, match="in use by another broker"):
            SqliteStore.open(path)
        for _ in range(5):
            acknowledged = acknowledge(process, 5)
            found = loaded(SqliteStore.open_readonly(path))
            assert found.revision >= acknowledged
            live = live_again(nothing, found.revision)
            assert make.state(Ledger.restore(found)) == make.state(live)


# -- full disks


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


def test_store_on_a_full_disk_does_not_load(disk):
    with closing(SqliteStore.open(disk / "store.db")) as store:
        fill(disk)
        with pytest.raises(
            StoreFailed, match=r"store\.db cannot be used: the disk is full; free some"
        ):
            store.load()


def test_store_continues_when_there_is_space_again(disk):
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


def test_new_store_on_a_full_disk_is_rejected_and_can_be_created_later(disk):
    ballast = fill(disk)
    with pytest.raises(StoreFailed, match="the disk is full"):
        SqliteStore.open(disk / "store.db").load()
    ballast.unlink()
    with closing(SqliteStore.open(disk / "store.db")) as store:
        assert store.load()[:3] == ([], [], 0)


def test_file_at_its_size_limit_loses_no_acknowledged_commit(tmp_path):
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


# -- damage

OLD = [
    make.reservation(f"old-{number}", phase=Phase.RELEASED, finished_at=make.T0)
    for number in range(50)
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A file with some of everything, all of it written back from the log."""
    path = tmp_path_factory.mktemp("sound") / "store.db"
    clusters = [make.cluster(f"cluster-{number}", region="eu") for number in range(50)]
    reservations = [make.reservation(f"rsv-{number}") for number in range(200)]
    with closing(SqliteStore.open(path)) as store:
        store.commit([*clusters, *reservations, *OLD], 300)
        store.commit([Archived(found.id) for found in OLD], 350)
    return path


@pytest.fixture(scope="module")
def truth(sound):
    return look(sound)


def look(path):
    """All that a broker loads at its start, and all that an audit can ask for."""
    with closing(SqliteStore.open(path)) as store:
        working_set = store.load()
    with closing(SqliteStore.open_readonly(path)) as store:
        return working_set, store.load(), [store.archived(found.id) for found in OLD]


def assert_right_or_refused(content: bytes, truth) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store.db"
        path.write_bytes(content)
        try:
            found, refusal = look(path), None
        except (StoreFailed, InvalidSettings) as problem:
            found, refusal = truth, str(problem)
        assert found == truth
        assert refusal is None or str(path) in refusal


@given(data=st.data())
@settings(max_examples=100)
def test_flipped_bits_give_no_wrong_data(sound, truth, data):
    content = bytearray(sound.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= data.draw(st.integers(1, 255))
    assert_right_or_refused(bytes(content), truth)


@given(data=st.data())
@settings(max_examples=50)
def test_zeroed_range_gives_no_wrong_data(sound, truth, data):
    content = bytearray(sound.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    length = min(data.draw(st.sampled_from([16, 512, 4096, 65536])), len(content) - start)
    content[start : start + length] = bytes(length)
    assert_right_or_refused(bytes(content), truth)


@given(data=st.data())
@settings(max_examples=50)
def test_truncated_file_gives_no_wrong_data(sound, truth, data):
    content = sound.read_bytes()
    assert_right_or_refused(content[: data.draw(st.integers(0, len(content) - 1))], truth)


def swap_roots(path, mine, others):
    """Make one table or index read another's pages, each of which is sound in itself."""
    with closing(sqlite3.connect(path)) as shell, shell:
        shell.execute("PRAGMA writable_schema = ON")
        shell.execute(
            "UPDATE sqlite_schema SET rootpage ="
            " (SELECT rootpage FROM sqlite_schema WHERE name = ?) WHERE name = ?",
            (others, mine),
        )


@pytest.mark.parametrize(
    "mine, others, opener",
    [
        # Rows of the archive have the right shape and checksums, and would come back to life.
        ("reservations", "archive", SqliteStore.open),
        # An index that misses rows lets the next change of each add a second one.
        ("sqlite_autoindex_clusters_1", "sqlite_autoindex_meta_1", SqliteStore.open),
        ("sqlite_autoindex_archive_1", "sqlite_autoindex_clusters_1", SqliteStore.open_readonly),
    ],
)
def test_pages_of_another_file_are_detected(sound, tmp_path, mine, others, opener):
    path = tmp_path / "store.db"
    shutil.copy(sound, path)
    swap_roots(path, mine, others)
    with closing(opener(path)) as store, pytest.raises(StoreFailed, match="it is damaged"):
        store.load()


def test_damage_is_reported_with_the_path_and_a_hint(sound, tmp_path):
    path = tmp_path / "store.db"
    shutil.copy(sound, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(StoreFailed) as refused:
        look(path)
    assert str(refused.value).startswith(f"the store {path} cannot be used: it is damaged")
    assert refused.value.hint.startswith("restore a backup, and remove the -wal, -shm and -lock")
