"""`kubelend lab down`: tells a supervisor to end all that it started; if it is gone, does it in its place."""

from __future__ import annotations

import os
import signal
import time

from kubelend.lab import hosts, sessions
from kubelend.lab.records import Home, Record

_ENDS_WITHIN = 60.0
_POLL = 0.05


def stop(home: Home) -> bool:
    """Leaves nothing of it, not even its directory. Gives whether there was anything."""
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
    """End what a supervisor that is gone has left behind."""
    record = home.find()
    if record is None:
        return
    sessions.end(record.pid, home.directory)
    if record.kind:
        hosts.delete_kind(home, record.kind)


def _stop_supervisor(home: Home) -> None:
    record = _record_of_living(home)
    # While it lives it holds the lock; still, its number is looked at twice.
    if record is not None and record.pid in sessions.members(record.pid, home.directory):
        os.kill(record.pid, signal.SIGTERM)
        os.kill(record.pid, signal.SIGCONT)


def _record_of_living(home: Home) -> Record | None:
    """One that has just been started may not have written it yet."""
    deadline = time.monotonic() + _ENDS_WITHIN
    while home.is_locked():
        if (record := home.find()) is not None or time.monotonic() > deadline:
            return record
        time.sleep(_POLL)
    return None


def _locked(home: Home, deadline: float) -> int | None:
    """None if the supervisor does not end; it is then ended with all others."""
    while (lock := home.lock()) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL)
    return lock
