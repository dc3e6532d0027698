"""Plain text in columns, for the programs that speak to a person. Text in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_GAP = "  "


def aligned(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> list[str]:
    """A line for the headers and for each row; the columns in `right` are aligned to the right."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    to_the_right = set(right)
    return [
        _GAP.join(
            cell.rjust(width) if place in to_the_right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
