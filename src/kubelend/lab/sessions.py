"""Finds and stops the child processes of a supervisor that has crashed.

They are identified by session ID and working directory together, because process IDs are reused.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_POLL = 0.02
_FINISHED_WITHIN = 4.0
_KILLED_WITHIN = 10.0


def members(session: int, directory: Path) -> list[int]:
    """Returns the running processes, without zombies."""
    return [pid for pid in _all() if _session(pid) == session and _is_in(pid, directory)]


def end(session: int, directory: Path) -> None:
    """Terminates all processes, and kills those that do not exit in time."""
    found = members(session, directory)
    _signal(found, signal.SIGTERM)
    # A suspended process would not handle the signal.
    _signal(found, signal.SIGCONT)
    if not _gone_within(session, directory, _FINISHED_WITHIN):
        _signal(members(session, directory), signal.SIGKILL)
        _gone_within(session, directory, _KILLED_WITHIN)


def _gone_within(session: int, directory: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while members(session, directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _all() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _session(pid: int) -> int:
    """Returns 0 if the process has exited meanwhile."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _is_in(pid: int, directory: Path) -> bool:
    try:
        place = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return False
    return str(place).removesuffix(" (deleted)") == str(directory.resolve())
