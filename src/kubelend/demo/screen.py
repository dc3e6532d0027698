"""Output of the demo, at most 80 columns wide; on a terminal with a live table of the clusters."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kubelend.core import resources
from kubelend.kits import tables
from kubelend.wire import bodies

_REFRESH_RATE = 8
"""Refreshes per second."""
_BAR_WIDTH = 16
_INDENT = "    "
_NO_RESOURCES = bodies.Quantities("0", "0")


class Display:
    """Prints finished steps. With `live`, shows the table of clusters and the current step below them."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console = console
        self._live = live
        self._clusters: Sequence[bodies.Cluster] = ()
        self._current: Spinner | None = None

    def heading(self, text: str) -> None:
        self._print(text, style="bold")

    def show_line(self, text: str) -> None:
        self._print(text.removesuffix("\n"))

    def begin(self, number: int, title: str) -> None:
        """A step has started."""
        self._current = Spinner("dots", Text(f"{number:>2}  {title}", style="bold"))
        self._update()

    def step(self, number: int, title: str, seconds: float, lines: Sequence[str]) -> None:
        """A step has finished."""
        self._current = None
        self._print("", tables.title_line(f"{number:>2}  {title}", seconds), style="bold")
        self._print(*(_INDENT + line for line in lines))
        self._update()

    def show_clusters(self, clusters: Sequence[bodies.Cluster]) -> None:
        """The current state of the clusters; printed on a terminal only."""
        self._clusters = clusters
        self._update()

    def show_commands(self, text: str, lines: Sequence[str]) -> None:
        """Commands to copy; lines are not wrapped."""
        self._print("", text, style="bold")
        self._print("", *lines, "")

    def _print(self, *lines: str, style: str = "") -> None:
        for line in lines:
            self._console.print(line, style=style, soft_wrap=True, markup=False, emoji=False)
        self._console.file.flush()

    def _update(self) -> None:
        if self._live is not None:
            table = [cluster_table(self._clusters)] if self._clusters else []
            current = [self._current] if self._current else []
            self._live.update(Group(Text(), *table, *current))


@contextmanager
def open_display(console: Console | None = None) -> Iterator[Display]:
    """Returns a live display on a terminal, plain output elsewhere. Printed steps stay when it closes."""
    console = console or Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield Display(console, None)
        return
    with Live(console=console, refresh_per_second=_REFRESH_RATE, transient=True) as live:
        yield Display(console, live)


def cluster_table(clusters: Sequence[bodies.Cluster]) -> Table:
    """Returns one row per cluster: used, lent and free CPU, and whether it is active."""
    shown = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name in ("CLUSTER", "CPU used lent free", "CPU FREE", "GPU FREE", "LENT", "STATE"):
        shown.add_column(name, no_wrap=True)
    for cluster in clusters:
        offer, status = cluster.advertisement, cluster.status
        free = offer.resources.available or _NO_RESOURCES
        shown.add_row(
            offer.cluster_id,
            _cpu_bar(offer.resources),
            str(free.cpu),
            str(free.gpu or "-"),
            str(status.reservations or "-"),
            Text("active", style="green") if status.active else Text("stale", style="red"),
        )
    return shown


def _cpu_bar(parts: bodies.Metrics) -> Text:
    """Draws the CPU of a cluster: used by its own pods, lent, free."""
    total, used, lent = (
        resources.parse_offered({"cpu": str((amounts or _NO_RESOURCES).cpu)}).cpu
        for amounts in (parts.allocatable or parts.capacity, parts.allocated, parts.reserved)
    )
    own = min(_BAR_WIDTH, round(used * _BAR_WIDTH / (total or 1)))
    others = min(_BAR_WIDTH - own, -(-lent * _BAR_WIDTH // (total or 1)))
    return Text.assemble(
        ("█" * own, "blue"), ("█" * others, "yellow"), ("░" * (_BAR_WIDTH - own - others), "dim")
    )


def wrap_text(text: str) -> list[str]:
    """Wraps text to the width of the output."""
    return textwrap.wrap(text, tables.DEFAULT_WIDTH - len(_INDENT), break_on_hyphens=False)
