"""Stops the lab (`lab down`): signals the supervisor, or cleans up after one that has crashed."""

from __future__ import annotations

import os
import signal
import time

from kubelend.lab import hosts, sessions
from kubelend.lab.records import LabDirectory, LabState

_STOP_TIMEOUT = 60.0
_LOCK_POLL = 0.05


def stop_lab(home: LabDirectory) -> bool:
    """Stops everything and removes the directory; returns whether there was a lab."""
    if not home.exists():
        return False
    _stop_supervisor(home)
    lock = _wait_for_lock(home, time.monotonic() + _STOP_TIMEOUT)
    try:
        clean_up(home)
        home.remove()
    finally:
        if lock is not None:
            os.close(lock)
    return True


def clean_up(home: LabDirectory) -> None:
    """Stops processes and kind clusters that a crashed supervisor has left behind."""
    record = home.read_state()
    if record is None:
        return
    sessions.end_session(record.pid, home.directory)
    if record.kind:
        hosts.delete_kind_clusters(home, record.kind)


def _stop_supervisor(home: LabDirectory) -> None:
    record = _wait_for_state(home)
    # A running supervisor holds the lock; its PID is verified nevertheless.
    if record is not None and record.pid in sessions.session_processes(record.pid, home.directory):
        os.kill(record.pid, signal.SIGTERM)
        os.kill(record.pid, signal.SIGCONT)


def _wait_for_state(home: LabDirectory) -> LabState | None:
    """Waits for the state file of a supervisor that has just been started."""
    deadline = time.monotonic() + _STOP_TIMEOUT
    while home.is_locked():
        if (record := home.read_state()) is not None or time.monotonic() > deadline:
            return record
        time.sleep(_LOCK_POLL)
    return None


def _wait_for_lock(home: LabDirectory, deadline: float) -> int | None:
    """Waits for the lock; returns None if the supervisor does not exit, which `sweep` then kills."""
    while (lock := home.lock()) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOCK_POLL)
    return lock
