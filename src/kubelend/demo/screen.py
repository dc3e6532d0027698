"""Output of the demo: a live display on a terminal, plain text that fits 80 columns elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kubelend.core import resources
from kubelend.demo import telling
from kubelend.demo.telling import PlainTeller, Teller
from kubelend.wire import bodies

_REFRESH = 8
"""Refreshes per second."""
_BAR = 16
_BLANK = bodies.Quantities("0", "0")


class ScreenTeller:
    """Prints finished steps and keeps the table of clusters and the current step at the bottom."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._clusters: Sequence[bodies.Cluster] = ()
        self._current: Spinner | None = None

    def heading(self, text: str) -> None:
        self._print(Text(text, style="bold"))

    def begin(self, number: int, title: str) -> None:
        self._current = Spinner("dots", Text(f"{number:>2}  {title}", style="bold"))
        self._show()

    def step(self, number: int, title: str, seconds: float, lines: Sequence[str]) -> None:
        self._current = None
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        head.add_row(
            Text.assemble(("✓ ", "green"), (f"{number:>2}  {title}", "bold")),
            Text(telling.duration(seconds), style="dim"),
        )
        self._print(head, *(Text(f"      {line}") for line in lines))
        self._show()

    def fleet(self, clusters: Sequence[bodies.Cluster]) -> None:
        self._clusters = clusters
        self._show()

    def advice(self, text: str, lines: Sequence[str]) -> None:
        self._print(Text(f"\n{text}\n", style="bold"))
        for line in lines:
            # Not in a table: lines to be copied must not be wrapped or padded.
            self._live.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _print(self, *parts: Table | Text) -> None:
        for part in parts:
            self._live.console.print(part)

    def _show(self) -> None:
        parts = [part for part in (table(self._clusters), self._current) if part is not None]
        self._live.update(Group(Text(), *parts))


@contextmanager
def teller() -> Iterator[Teller]:
    """Returns a live display on a terminal, plain output elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainTeller()
        return
    with opened(console) as found:
        yield found


@contextmanager
def opened(console: Console) -> Iterator[ScreenTeller]:
    """Opens the live display. Printed steps stay on the terminal when it closes."""
    with Live(console=console, refresh_per_second=_REFRESH, transient=True) as live:
        yield ScreenTeller(live)


def table(clusters: Sequence[bodies.Cluster]) -> Table | None:
    """Returns one row per cluster: used, lent and free CPU, and whether it is active."""
    if not clusters:
        return None
    shown = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name in ("CLUSTER", "CPU used lent free", "CPU FREE", "GPU FREE", "LENT", "STATE"):
        shown.add_column(name, no_wrap=True)
    for cluster in clusters:
        shown.add_row(*_cells(cluster))
    return shown


def _cells(cluster: bodies.Cluster) -> tuple[str | Text, ...]:
    offer, status = cluster.advertisement, cluster.status
    free = offer.resources.available or _BLANK
    state = Text("active", style="green") if status.active else Text("stale", style="red")
    return (
        offer.cluster_id,
        _bar(cluster),
        str(free.cpu),
        str(free.gpu or "-"),
        str(status.reservations or "-"),
        state,
    )


def _bar(cluster: bodies.Cluster) -> Text:
    """Draws the CPU of a cluster: used by its own pods, lent, free."""
    parts = cluster.advertisement.resources
    total = _cores(parts.allocatable or parts.capacity) or 1
    used, lent = _cores(parts.allocated or _BLANK), _cores(parts.reserved or _BLANK)
    own = min(_BAR, round(used * _BAR / total))
    others = min(_BAR - own, -(-lent * _BAR // total))
    return Text.assemble(
        ("█" * own, "blue"), ("█" * others, "yellow"), ("░" * (_BAR - own - others), "dim")
    )


def _cores(amounts: bodies.Amounts) -> int:
    return resources.offered({"cpu": str(amounts.cpu)}).cpu
