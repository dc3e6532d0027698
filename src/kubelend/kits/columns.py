"""Tables of aligned plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_COLUMN_GAP = "  "


def align_columns(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> list[str]:
    """Return one line for the headers and one for each row. Columns in `right` are right-aligned."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right_aligned = set(right)
    return [
        _COLUMN_GAP.join(
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
