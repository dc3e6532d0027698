"""Stops the lab (`lab down`): signals the supervisor, or cleans up after one that has crashed."""

from __future__ import annotations

import os
import signal
import time

from kubelend.lab import hosts, sessions
from kubelend.lab.records import Home, Record

_ENDS_WITHIN = 60.0
_POLL = 0.05


def stop(home: Home) -> bool:
    """Stops everything and removes the directory; returns whether there was a lab."""
    if not home.is_there():
        return False
    _stop_supervisor(home)
    lock = _locked(home, time.monotonic() + _ENDS_WITHIN)
    try:
        sweep(home)
        home.remove()
    finally:
        if lock is not None:
            os.close(lock)
    return True


def sweep(home: Home) -> None:
    """Stops processes and kind clusters that a crashed supervisor has left behind."""
    record = home.find()
    if record is None:
        return
    sessions.end(record.pid, home.directory)
    if record.kind:
        hosts.delete_kind(home, record.kind)


def _stop_supervisor(home: Home) -> None:
    record = _record_of_living(home)
    # A running supervisor holds the lock; its PID is verified nevertheless.
    if record is not None and record.pid in sessions.members(record.pid, home.directory):
        os.kill(record.pid, signal.SIGTERM)
        os.kill(record.pid, signal.SIGCONT)


def _record_of_living(home: Home) -> Record | None:
    """Waits for the state file of a supervisor that has just been started."""
    deadline = time.monotonic() + _ENDS_WITHIN
    while home.is_locked():
        if (record := home.find()) is not None or time.monotonic() > deadline:
            return record
        time.sleep(_POLL)
    return None


def _locked(home: Home, deadline: float) -> int | None:
    """Waits for the lock; returns None if the supervisor does not exit, which `sweep` then kills."""
    while (lock := home.lock()) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL)
    return lock
