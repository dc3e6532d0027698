"""Text output: tables and lists as kubectl prints them, durations and times, terminal sanitizing.

Pure functions. Control characters in cells are escaped, so that a row is always one line.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

DEFAULT_WIDTH = 80
"""Columns at which text is wrapped if the width of the terminal is unknown."""

_TABLE_GAP = "  "
_MIN_WIDTH = 20


def format_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None
) -> str:
    """Aligned columns. With a width, the last column is wrapped; no cell is truncated."""
    cells = [list(headers), *([sanitize_line(cell) or "-" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = (
        None if width is None else max(_MIN_WIDTH, width - sum(widths[:-1]) - 2 * len(widths) + 2)
    )
    return "\n".join(line for row in cells for line in _wrapped_row(row, widths, last))


def format_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One line of a table that is printed row by row; longer cells shift the following ones."""
    sanitized = (sanitize_line(cell) or "-" for cell in cells)
    padded = (f"{cell:<{width}}" for cell, width in zip(sanitized, widths, strict=True))
    return _TABLE_GAP.join(padded).rstrip()


def format_pairs(items: Iterable[tuple[str, str]]) -> str:
    """`Name:  value` lines; empty values are omitted."""
    known = [(sanitize_line(name) + ":", sanitize_line(value)) for name, value in items if value]
    longest = max((len(name) for name, _ in known), default=0)
    return "\n".join(f"{name:<{longest}}{_TABLE_GAP}{value}" for name, value in known)


def format_count(number: int, noun: str) -> str:
    """ "1 cluster", "2 clusters"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_age(since: datetime | None, now: datetime) -> str:
    """Rounded time since a moment; empty for None."""
    return "" if since is None else format_span(now - since)


def format_span(duration: timedelta) -> str:
    """Rounded duration: "45s", "5m", "2h30m", "12h", "3d"."""
    seconds = max(0, round(duration.total_seconds()))
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 120:
        return f"{minutes}m"
    if minutes < 600:
        return f"{minutes // 60}h" + (f"{minutes % 60}m" if minutes % 60 else "")
    return f"{hours}h" if hours < 48 else f"{round(seconds / 86400)}d"


def format_time(at: datetime | None, now: datetime) -> str:
    """Absolute time, with the rounded distance from now."""
    if at is None:
        return ""
    text = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    return (
        f"{text} (in {format_span(at - now)})"
        if at > now
        else f"{text} ({format_span(now - at)} ago)"
    )


def format_time_left(end: datetime, now: datetime) -> str:
    """Remaining time, in whole days if there are any."""
    if end <= now:
        return "ended"
    days = (end - now).days
    return f"{days}d" if days else format_span(end - now)


def title_line(title: str, seconds: float) -> str:
    """One line of `DEFAULT_WIDTH` columns with the duration at its end; a longer title is wrapped."""
    right = format_seconds(seconds)
    width = DEFAULT_WIDTH - len(right) - 1
    *first, last = textwrap.wrap(
        title, width, subsequent_indent=" " * 4, break_on_hyphens=False
    ) or [""]
    return "\n".join([*first, f"{last:<{width}} {right}"])


def format_seconds(seconds: float) -> str:
    """Measured time with at most three digits: "0.8 ms", "12 ms", "1.2 s"."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _wrapped_row(cells: list[str], widths: list[int], width: int | None) -> list[str]:
    if width is None or len(cells[-1]) <= width:
        return [format_row(cells, [*widths[:-1], 0])]
    first, *others = textwrap.wrap(cells[-1], width)
    indent = " " * (sum(widths[:-1]) + len(_TABLE_GAP) * (len(widths) - 1))
    return [
        format_row([*cells[:-1], first], [*widths[:-1], 0]),
        *(indent + other for other in others),
    ]


def align_columns(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> list[str]:
    """Return one line for the headers and one for each row. Columns in `right` are right-aligned."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right_aligned = set(right)
    return [
        _TABLE_GAP.join(
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0 and C1 control characters
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional formatting
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff]"  # surrogates, which cannot be encoded
)
_CONTROL_BUT_NEWLINE = re.compile(_CONTROL.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))


def sanitize_line(text: str) -> str:
    """Escape control characters and line ends, as `\\x1b` or `\\u202e`."""
    return _CONTROL.sub(_escaped_form, text)


def sanitize_lines(text: str) -> str:
    """Escape control characters in text of several lines; line ends are preserved."""
    return _CONTROL_BUT_NEWLINE.sub(_escaped_form, text)


def sanitize_json(text: str) -> str:
    """Escape control characters in JSON, where they occur only within strings: the values stay the same."""
    return _CONTROL_BUT_NEWLINE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped_form(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
