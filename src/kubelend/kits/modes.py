"""Checks of directory modes at start."""

from __future__ import annotations

import stat
from pathlib import Path


def directory_mode_problem(path: Path) -> str:
    """Return what is wrong with a directory's mode, as one sentence; empty if nothing is.

    With the sticky bit other users cannot replace files that they do not own, as in /tmp and in a mounted
    secret.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return ""
    return f"{path} has mode {mode:04o}, so other users can replace files in it; chmod o-w {path}"
