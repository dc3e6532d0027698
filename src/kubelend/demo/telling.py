"""Plain output of the demo: per step a title with its duration, followed by result lines.

Fits 80 columns.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Protocol

from kubelend.wire import bodies

WIDTH = 80
_INDENT = "    "


class ProgressDisplay(Protocol):
    """Displays the progress of the demo or the lab."""

    def heading(self, text: str) -> None: ...

    def begin(self, number: int, title: str) -> None:
        """A step has started."""

    def step(self, number: int, title: str, seconds: float, lines: Sequence[str]) -> None:
        """A step has finished."""

    def show_clusters(self, clusters: Sequence[bodies.Cluster]) -> None:
        """The current state of the clusters."""

    def show_commands(self, text: str, lines: Sequence[str]) -> None:
        """Commands to copy; lines are not wrapped."""


class PlainDisplay:
    """Prints each step when it has finished."""

    def heading(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, number: int, title: str) -> None:
        """Prints nothing: output without a terminal cannot be overwritten."""

    def step(self, number: int, title: str, seconds: float, lines: Sequence[str]) -> None:
        head = title_line(f"{number:>2}  {title}", seconds)
        print("", head, *(_INDENT + line for line in lines), sep="\n")
        sys.stdout.flush()

    def show_clusters(self, clusters: Sequence[bodies.Cluster]) -> None:
        """Prints nothing: the steps print what matters."""

    def show_commands(self, text: str, lines: Sequence[str]) -> None:
        print("", text, "", *lines, "", sep="\n", flush=True)


def wrap_text(text: str) -> list[str]:
    """Wraps text to the width of the output."""
    return textwrap.wrap(text, WIDTH - len(_INDENT), break_on_hyphens=False)


def title_line(title: str, seconds: float) -> str:
    """Returns one line with the duration right-aligned."""
    right = format_seconds(seconds)
    return f"{title}{' ' * max(1, WIDTH - len(title) - len(right))}{right}"


def format_seconds(seconds: float) -> str:
    """Formats seconds with at most three digits: 0.8 ms, 12 ms, 1.2 s."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
