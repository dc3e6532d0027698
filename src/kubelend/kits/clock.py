"""The wall clock, read here and nowhere else: everything that needs the time is handed a function.

Composition roots pass `utc_now` to the broker; tests pass a clock that they move by hand.
"""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """The time, aware and in UTC."""
    return datetime.now(UTC)
