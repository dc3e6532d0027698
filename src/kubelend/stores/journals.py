"""The table of the audit log, written in the transaction of the changes it records."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from kubelend.core import journal
from kubelend.core.journal import Head, Line
from kubelend.stores import statements
from kubelend.stores.statements import Rows

_PUT_LINES = Rows("INSERT INTO journal (number, line, digest) VALUES", "(?, CAST(? AS TEXT), ?)")
_LINES = """
    SELECT number, CAST(line AS BLOB), digest FROM journal WHERE number > ? ORDER BY number LIMIT ?
"""
_END = "SELECT line, digest FROM meta WHERE key = 'revision'"
_START = "SELECT value, digest FROM meta WHERE key = 'journal start'"
_SET_START = "UPDATE meta SET value = ?, digest = ? WHERE key = 'journal start'"
_CUT = "DELETE FROM journal WHERE number <= ?"


def put(connection: sqlite3.Connection, lines: Sequence[Line]) -> None:
    """Append lines."""
    statements.put(connection, _PUT_LINES, lines)


def cut(connection: sqlite3.Connection, line: int) -> None:
    """Delete the lines up to this one; the chain head behind it is kept."""
    for found in read(connection, line - 1, 1):
        if found.number == line:
            connection.execute(_SET_START, (found.number, found.digest))
            connection.execute(_CUT, (line,))


def read(connection: sqlite3.Connection, after: int, limit: int) -> list[Line]:
    return [Line(*row) for row in connection.execute(_LINES, (after, limit))]


def ends(connection: sqlite3.Connection) -> tuple[Head, Head]:
    return _head(connection, _START), _head(connection, _END)


def _head(connection: sqlite3.Connection, query: str) -> Head:
    row: Sequence[object] | None = connection.execute(query).fetchone()
    return journal.START if row is None else Head(*row)  # type: ignore[arg-type]
