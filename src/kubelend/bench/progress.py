"""What a benchmark is doing right now, for a person who watches: one line, written over and over."""

from __future__ import annotations

import sys

_CLEAR = "\r\x1b[K"


def say(text: str) -> None:
    """On a terminal only: a program that collects stderr is not interested."""
    if sys.stderr.isatty():
        print(f"{_CLEAR}{text} ...", end="", file=sys.stderr, flush=True)


def done() -> None:
    """Leave nothing behind."""
    if sys.stderr.isatty():
        print(_CLEAR, end="", file=sys.stderr, flush=True)
