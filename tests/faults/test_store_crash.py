"""`kill -9` at any moment: nothing that was acknowledged is lost, nothing is half there."""

import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager, suppress

import pytest

import make
from faults import committing
from kubelend.core import audit
from kubelend.core.errors import StoreFailed
from kubelend.core.events import WorkingSet
from kubelend.core.ledger import Ledger
from kubelend.stores.sqlite import SqliteStore


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
        desk.ledger for desk in committing.history(start) if desk.ledger.revision >= revision
    )


@pytest.mark.timeout(180)
def test_killed_at_random_moments_it_has_lost_nothing_it_acknowledged(tmp_path):
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


def test_file_of_a_killed_process_can_be_read_before_it_is_opened_again(tmp_path):
    path = tmp_path / "store.db"
    with committer(path) as process:
        acknowledged = max(acknowledge(process, 50), kill(process))
    found = loaded(SqliteStore.open_readonly(path))
    assert found.revision >= acknowledged
    again = loaded(SqliteStore.open(path))
    assert make.state(Ledger.restore(again)) == make.state(Ledger.restore(found))


def test_running_process_keeps_others_from_writing_and_lets_them_read(tmp_path):
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


def test_kill_leaves_no_lock_behind(tmp_path):
    path = tmp_path / "store.db"
    with committer(path) as process:
        acknowledge(process, 1)
        kill(process)
    store = SqliteStore.open(path)
    assert store.load().revision >= 1
    store.close()
