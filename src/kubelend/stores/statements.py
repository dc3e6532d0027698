"""Multi-row SQL statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

MOST_ROWS = 64
"""In one statement. Each number of rows is a statement of its own, which SQLite prepares once."""


class Rows(NamedTuple):
    """An INSERT statement for any number of rows."""

    head: str
    row: str
    tail: str = ""


def put(connection: sqlite3.Connection, rows: Rows, values: Sequence[tuple[object, ...]]) -> None:
    """In as few statements as possible: each one releases and reacquires the GIL."""
    for start in range(0, len(values), MOST_ROWS):
        some = values[start : start + MOST_ROWS]
        connection.execute(_statement(rows, len(some)), tuple(chain.from_iterable(some)))


@cache
def _statement(rows: Rows, size: int) -> str:
    return f"{rows.head} {', '.join([rows.row] * size)} {rows.tail}"
