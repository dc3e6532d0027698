"""Output of the demo: a live display on a terminal, plain text that fits 80 columns elsewhere."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kubelend.core import resources
from kubelend.wire import bodies

_REFRESH_RATE = 8
"""Refreshes per second."""
_BAR_WIDTH = 16
_NO_RESOURCES = bodies.Quantities("0", "0")


class LiveDisplay:
    """Prints finished steps and keeps the table of clusters and the current step at the bottom."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._clusters: Sequence[bodies.Cluster] = ()
        self._current: Spinner | None = None

    def heading(self, text: str) -> None:
        self._print(Text(text, style="bold"))

    def begin(self, number: int, title: str) -> None:
        self._current = Spinner("dots", Text(f"{number:>2}  {title}", style="bold"))
        self._update()

    def step(self, number: int, title: str, seconds: float, lines: Sequence[str]) -> None:
        self._current = None
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        head.add_row(
            Text.assemble(("✓ ", "green"), (f"{number:>2}  {title}", "bold")),
            Text(format_seconds(seconds), style="dim"),
        )
        self._print(head, *(Text(f"      {line}") for line in lines))
        self._update()

    def show_clusters(self, clusters: Sequence[bodies.Cluster]) -> None:
        self._clusters = clusters
        self._update()

    def show_commands(self, text: str, lines: Sequence[str]) -> None:
        self._print(Text(f"\n{text}\n", style="bold"))
        for line in lines:
            # Not in a table: lines to be copied must not be wrapped or padded.
            self._live.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _print(self, *parts: Table | Text) -> None:
        for part in parts:
            self._live.console.print(part)

    def _update(self) -> None:
        parts = [
            part for part in (cluster_table(self._clusters), self._current) if part is not None
        ]
        self._live.update(Group(Text(), *parts))


@contextmanager
def open_display() -> Iterator[ProgressDisplay]:
    """Returns a live display on a terminal, plain output elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainDisplay()
        return
    with open_live_display(console) as found:
        yield found


@contextmanager
def open_live_display(console: Console) -> Iterator[LiveDisplay]:
    """Opens the live display. Printed steps stay on the terminal when it closes."""
    with Live(console=console, refresh_per_second=_REFRESH_RATE, transient=True) as live:
        yield LiveDisplay(live)


def cluster_table(clusters: Sequence[bodies.Cluster]) -> Table | None:
    """Returns one row per cluster: used, lent and free CPU, and whether it is active."""
    if not clusters:
        return None
    shown = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name in ("CLUSTER", "CPU used lent free", "CPU FREE", "GPU FREE", "LENT", "STATE"):
        shown.add_column(name, no_wrap=True)
    for cluster in clusters:
        shown.add_row(*_cluster_row(cluster))
    return shown


def _cluster_row(cluster: bodies.Cluster) -> tuple[str | Text, ...]:
    offer, status = cluster.advertisement, cluster.status
    free = offer.resources.available or _NO_RESOURCES
    state = Text("active", style="green") if status.active else Text("stale", style="red")
    return (
        offer.cluster_id,
        _cpu_bar(cluster),
        str(free.cpu),
        str(free.gpu or "-"),
        str(status.reservations or "-"),
        state,
    )


def _cpu_bar(cluster: bodies.Cluster) -> Text:
    """Draws the CPU of a cluster: used by its own pods, lent, free."""
    parts = cluster.advertisement.resources
    total = _millicores(parts.allocatable or parts.capacity) or 1
    used, lent = (
        _millicores(parts.allocated or _NO_RESOURCES),
        _millicores(parts.reserved or _NO_RESOURCES),
    )
    own = min(_BAR_WIDTH, round(used * _BAR_WIDTH / total))
    others = min(_BAR_WIDTH - own, -(-lent * _BAR_WIDTH // total))
    return Text.assemble(
        ("█" * own, "blue"), ("█" * others, "yellow"), ("░" * (_BAR_WIDTH - own - others), "dim")
    )


def _millicores(amounts: bodies.Amounts) -> int:
    return resources.parse_offered({"cpu": str(amounts.cpu)}).cpu


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
