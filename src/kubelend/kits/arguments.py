"""Secrets given on a command line: taken out of what `ps` shows of this process.

Commands that take a secret as a flag call `hide_argument` as the first thing they do. Until then, and in the
shell's history, it can be seen: a flag is the second best place for a secret, and a file the best.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_STATUS = Path("/proc/self/stat")
_MEMORY = Path("/proc/self/mem")
_ARG_START, _ARG_END = 47, 48
"""Where the command line lies: fields 48 and 49 of /proc/PID/stat, as proc(5) counts them."""


def hide_argument(secret: str) -> bool:
    """Overwrite a secret in this process's command line; True if it was there and is no longer seen.

    Only Linux lets a process do that. Elsewhere, and where the system forbids it, nothing happens.
    """
    wanted = os.fsencode(secret)
    if not wanted:
        return False
    try:
        found = _command_line()
        if wanted not in found.text:
            return False
        _write(found.start, found.text.replace(wanted, b"*" * len(wanted)))
        return wanted not in _command_line().text
    except (OSError, ValueError, IndexError, OverflowError):
        return False


class _CommandLine(NamedTuple):
    start: int
    text: bytes


def _command_line() -> _CommandLine:
    # The second field is the program's name in parentheses, and may have spaces of its own.
    fields = ["", "", *_STATUS.read_text(errors="replace").rpartition(")")[2].split()]
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    with _MEMORY.open("rb", buffering=0) as memory:
        memory.seek(start)
        return _CommandLine(start, memory.read(end - start) or b"")


def _write(start: int, text: bytes) -> None:
    with _MEMORY.open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text)
