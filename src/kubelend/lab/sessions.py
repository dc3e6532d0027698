"""The processes of one supervisor, found without it: after it was killed, they are all that is left.

A supervisor leads a session, which nothing that it starts can leave unnoticed, in the directory of its
clusters. Both together are how a process is known as one of ours: numbers of processes are used again.
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
    """Those that run. One that has ended and was not waited for is nobody's concern."""
    return [pid for pid in _all() if _session(pid) == session and _is_in(pid, directory)]


def end(session: int, directory: Path) -> None:
    """Stop all of them, by force if they take their time."""
    found = members(session, directory)
    _signal(found, signal.SIGTERM)
    # One that is paused would not hear it.
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
    """0 if it has ended meanwhile."""
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
