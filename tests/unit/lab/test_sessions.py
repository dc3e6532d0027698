"""Processes that a supervisor left behind are found and ended; those of others are not."""

import os
import signal
import subprocess
import sys

import pytest

from kubelend.lab import background

LEADER = """
import signal, subprocess
subprocess.Popen(["sleep", "60"], process_group=0)
{more}
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def start():
    """Starts the leader of a session, with a child in a group of its own."""
    started = []

    def start(directory, more=""):
        process = subprocess.Popen(
            [sys.executable, "-c", LEADER.format(more=more)],
            cwd=directory,
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        started.append((process, directory))
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process, directory in started:
        for pid in background.session_processes(process.pid, directory):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_all_of_a_session_are_found_without_its_leader(start, tmp_path):
    leader = start(tmp_path)
    leader.kill()
    leader.wait()
    [child] = background.session_processes(leader.pid, tmp_path)
    assert os.getpgid(child) == child
    background.end_session(leader.pid, tmp_path)
    assert background.session_processes(leader.pid, tmp_path) == []


def test_one_that_does_not_want_to_end_is_killed(start, tmp_path, monkeypatch):
    monkeypatch.setattr(background, "_TERM_TIMEOUT", 0.1)
    leader = start(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    background.end_session(leader.pid, tmp_path)
    assert leader.wait() == -signal.SIGKILL


def test_paused_one_ends_too(start, tmp_path):
    leader = start(tmp_path)
    leader.send_signal(signal.SIGSTOP)
    background.end_session(leader.pid, tmp_path)
    assert leader.wait() == -signal.SIGTERM


def test_process_elsewhere_is_not_ours_whatever_its_number(start, tmp_path):
    """The number of a supervisor that is long gone may be somebody else's now."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = start(elsewhere)
    background.end_session(other.pid, tmp_path)
    assert other.poll() is None
    assert len(background.session_processes(other.pid, elsewhere)) == 2
