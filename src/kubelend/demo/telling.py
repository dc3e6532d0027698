"""How the demo speaks: a title with its time for each step, and below it what there is to see.

Plain text that fits 80 columns; colour is for terminals only.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable

WIDTH = 80
_INDENT = "    "
_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def heading(text: str) -> None:
    print(_styled(_BOLD, text), flush=True)


def step(number: int, title: str, seconds: float, lines: Iterable[str]) -> None:
    """One step that has been done, and checked."""
    left, right = f"{number:>2}  {title}", duration(seconds)
    gap = " " * max(1, WIDTH - len(left) - len(right))
    print(f"\n{_styled(_BOLD, left)}{gap}{_styled(_DIM, right)}")
    for line in lines:
        print(_INDENT + line)
    sys.stdout.flush()


def sentence(text: str) -> list[str]:
    """Prose, in as many lines as it needs."""
    return textwrap.wrap(text, WIDTH - len(_INDENT), break_on_hyphens=False)


def duration(seconds: float) -> str:
    """Three digits at most: 0.8 ms, 12 ms, 1.2 s."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _styled(style: str, text: str) -> str:
    wanted = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"{style}{text}{_RESET}" if wanted else text
