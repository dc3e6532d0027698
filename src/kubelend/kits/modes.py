"""Who else may change what is in a directory: looked at once, when a process starts."""

from __future__ import annotations

import stat
from pathlib import Path


def exposed_directory(path: Path) -> str:
    """What is wrong with a directory's mode, as one sentence; empty when nothing is.

    The sticky bit keeps others from replacing files that are not theirs, as in /tmp and in a mounted secret.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return ""
    return f"{path} has mode {mode:04o}, so others can replace what is in it; chmod o-w {path}"
