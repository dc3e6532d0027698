"""Progress output of benchmarks: one line on the terminal that is overwritten."""

from __future__ import annotations

import sys

_CLEAR_LINE = "\r\x1b[K"


def show_progress(text: str) -> None:
    """Prints the line if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"{_CLEAR_LINE}{text} ...", end="", file=sys.stderr, flush=True)


def clear_progress() -> None:
    """Clears the line."""
    if sys.stderr.isatty():
        print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
