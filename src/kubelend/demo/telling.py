"""How the demo speaks: a title with its time for each step, and below it what there is to see.

Plain text that fits 80 columns, for pipes and files; on a terminal `demo.screen` takes its place.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Protocol

from kubelend.wire import bodies

WIDTH = 80
_INDENT = "    "


class Teller(Protocol):
    """Shows the story while it happens."""

    def heading(self, text: str) -> None: ...

    def begin(self, number: int, title: str) -> None:
        """A step has begun."""

    def step(self, number: int, title: str, seconds: float, lines: Sequence[str]) -> None:
        """It has been done, and checked."""

    def fleet(self, clusters: Sequence[bodies.Cluster]) -> None:
        """How the clusters stand now."""

    def advice(self, text: str, lines: Sequence[str]) -> None:
        """What to try, to be copied: lines are not wrapped."""


class PlainTeller:
    """Line by line, when a step is done."""

    def heading(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, number: int, title: str) -> None:
        """Nothing to say yet: there is no line to take back."""

    def step(self, number: int, title: str, seconds: float, lines: Sequence[str]) -> None:
        head = timed(f"{number:>2}  {title}", seconds)
        print("", head, *(_INDENT + line for line in lines), sep="\n")
        sys.stdout.flush()

    def fleet(self, clusters: Sequence[bodies.Cluster]) -> None:
        """Steps show it when it matters."""

    def advice(self, text: str, lines: Sequence[str]) -> None:
        print("", text, "", *lines, "", sep="\n", flush=True)


def sentence(text: str) -> list[str]:
    """Prose, in as many lines as it needs."""
    return textwrap.wrap(text, WIDTH - len(_INDENT), break_on_hyphens=False)


def timed(title: str, seconds: float) -> str:
    """One line, with the time at its end."""
    right = duration(seconds)
    return f"{title}{' ' * max(1, WIDTH - len(title) - len(right))}{right}"


def duration(seconds: float) -> str:
    """Three digits at most: 0.8 ms, 12 ms, 1.2 s."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
