"""Tables and lists as kubectl prints them: plain columns, no boxes, no colour. Pure text in and out.

A row is a line, whatever its cells hold.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from kubelend.cli import escapes

WIDTH = 80
"""Where text is wrapped, if nobody knows better."""

_GAP = "  "
_NARROWEST = 20


def columns(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None
) -> str:
    """Aligned columns. With a width, the last one is wrapped to stay within; names are never cut."""
    cells = [list(headers), *([escapes.line(cell) or "-" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = (
        None if width is None else max(_NARROWEST, width - sum(widths[:-1]) - 2 * len(widths) + 2)
    )
    return "\n".join(line for row in cells for line in _lines(row, widths, room))


def row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One line of a table whose end is not known yet; longer cells push the others."""
    harmless = (escapes.line(cell) or "-" for cell in cells)
    padded = (f"{cell:<{width}}" for cell, width in zip(harmless, widths, strict=True))
    return _GAP.join(padded).rstrip()


def pairs(items: Iterable[tuple[str, str]]) -> str:
    """`Name:  value` lines, without those that have no value."""
    known = [(escapes.line(name) + ":", escapes.line(value)) for name, value in items if value]
    longest = max((len(name) for name, _ in known), default=0)
    return "\n".join(f"{name:<{longest}}{_GAP}{value}" for name, value in known)


def counted(number: int, noun: str) -> str:
    """ "1 cluster", "2 clusters"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def age(since: datetime | None, now: datetime) -> str:
    """How long ago, roughly."""
    return "" if since is None else span(now - since)


def span(duration: timedelta) -> str:
    """About how long: "45s", "5m", "2h30m", "12h", "3d"."""
    seconds = max(0, round(duration.total_seconds()))
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 120:
        return f"{minutes}m"
    if minutes < 600:
        return f"{minutes // 60}h" + (f"{minutes % 60}m" if minutes % 60 else "")
    return f"{hours}h" if hours < 48 else f"{round(seconds / 86400)}d"


def moment(at: datetime | None, now: datetime) -> str:
    """A time, and how far away it is."""
    if at is None:
        return ""
    text = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    return f"{text} (in {span(at - now)})" if at > now else f"{text} ({span(now - at)} ago)"


def left(end: datetime, now: datetime) -> str:
    """How long something still lasts; whole days where there are some."""
    if end <= now:
        return "ended"
    days = (end - now).days
    return f"{days}d" if days else span(end - now)


def _lines(cells: list[str], widths: list[int], room: int | None) -> list[str]:
    if room is None or len(cells[-1]) <= room:
        return [row(cells, [*widths[:-1], 0])]
    first, *others = textwrap.wrap(cells[-1], room)
    indent = " " * (sum(widths[:-1]) + len(_GAP) * (len(widths) - 1))
    return [row([*cells[:-1], first], [*widths[:-1], 0]), *(indent + other for other in others)]
