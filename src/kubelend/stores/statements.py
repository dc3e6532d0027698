"""Multi-row SQL statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

MAX_ROWS_PER_STATEMENT = 64
"""In one statement. Each number of rows is a statement of its own, which SQLite prepares once."""


class InsertStatement(NamedTuple):
    """An INSERT statement for any number of rows."""

    head: str
    row: str
    tail: str = ""


def insert_rows(
    connection: sqlite3.Connection, statement: InsertStatement, values: Sequence[tuple[object, ...]]
) -> None:
    """In as few statements as possible: each one releases and reacquires the GIL."""
    for start in range(0, len(values), MAX_ROWS_PER_STATEMENT):
        some = values[start : start + MAX_ROWS_PER_STATEMENT]
        connection.execute(_statement_text(statement, len(some)), tuple(chain.from_iterable(some)))


@cache
def _statement_text(statement: InsertStatement, size: int) -> str:
    return f"{statement.head} {', '.join([statement.row] * size)} {statement.tail}"
