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

_EXIT_POLL = 0.02
_TERM_TIMEOUT = 4.0
_KILL_TIMEOUT = 10.0


def session_processes(session: int, directory: Path) -> list[int]:
    """Returns the running processes, without zombies."""
    return [
        pid
        for pid in _all_pids()
        if _session_of(pid) == session and _has_working_directory(pid, directory)
    ]


def end_session(session: int, directory: Path) -> None:
    """Terminates all processes, and kills those that do not exit in time."""
    found = session_processes(session, directory)
    _send_signal(found, signal.SIGTERM)
    # A suspended process would not handle the signal.
    _send_signal(found, signal.SIGCONT)
    if not _wait_exited(session, directory, _TERM_TIMEOUT):
        _send_signal(session_processes(session, directory), signal.SIGKILL)
        _wait_exited(session, directory, _KILL_TIMEOUT)


def _wait_exited(session: int, directory: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while session_processes(session, directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_EXIT_POLL)
    return True


def _send_signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _all_pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _session_of(pid: int) -> int:
    """Returns 0 if the process has exited meanwhile."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _has_working_directory(pid: int, directory: Path) -> bool:
    try:
        place = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return False
    return str(place).removesuffix(" (deleted)") == str(directory.resolve())
