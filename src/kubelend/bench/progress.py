"""Progress output of benchmarks: one line on the terminal that is overwritten."""

from __future__ import annotations

import sys

_CLEAR = "\r\x1b[K"


def say(text: str) -> None:
    """Prints the line if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"{_CLEAR}{text} ...", end="", file=sys.stderr, flush=True)


def done() -> None:
    """Clears the line."""
    if sys.stderr.isatty():
        print(_CLEAR, end="", file=sys.stderr, flush=True)
