"""The table of the audit log, written in the transaction of the changes it records."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from kubelend.core import journal
from kubelend.core.journal import AuditLine, ChainHead
from kubelend.stores import statements
from kubelend.stores.statements import InsertStatement

_INSERT_AUDIT_LINES = InsertStatement(
    "INSERT INTO journal (number, line, digest) VALUES", "(?, CAST(? AS TEXT), ?)"
)
_SELECT_AUDIT_LINES = """
    SELECT number, CAST(line AS BLOB), digest FROM journal WHERE number > ? ORDER BY number LIMIT ?
"""
_SELECT_AUDIT_LOG_END = "SELECT line, digest FROM meta WHERE key = 'revision'"
_SELECT_AUDIT_LOG_START = "SELECT value, digest FROM meta WHERE key = 'journal start'"
_UPDATE_AUDIT_LOG_START = "UPDATE meta SET value = ?, digest = ? WHERE key = 'journal start'"
_DELETE_AUDIT_LINES = "DELETE FROM journal WHERE number <= ?"


def insert_audit_lines(connection: sqlite3.Connection, lines: Sequence[AuditLine]) -> None:
    """Append lines."""
    statements.insert_rows(connection, _INSERT_AUDIT_LINES, lines)


def truncate_audit_lines(connection: sqlite3.Connection, line: int) -> None:
    """Delete the lines up to this one; the chain head behind it is kept."""
    for found in read_audit_lines(connection, line - 1, 1):
        if found.number == line:
            connection.execute(_UPDATE_AUDIT_LOG_START, (found.number, found.digest))
            connection.execute(_DELETE_AUDIT_LINES, (line,))


def read_audit_lines(connection: sqlite3.Connection, after: int, limit: int) -> list[AuditLine]:
    return [AuditLine(*row) for row in connection.execute(_SELECT_AUDIT_LINES, (after, limit))]


def audit_log_bounds(connection: sqlite3.Connection) -> tuple[ChainHead, ChainHead]:
    return _chain_head(connection, _SELECT_AUDIT_LOG_START), _chain_head(
        connection, _SELECT_AUDIT_LOG_END
    )


def _chain_head(connection: sqlite3.Connection, query: str) -> ChainHead:
    row: Sequence[object] | None = connection.execute(query).fetchone()
    return journal.CHAIN_START if row is None else ChainHead(*row)  # type: ignore[arg-type]
