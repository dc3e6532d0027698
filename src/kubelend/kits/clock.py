"""The wall clock. Only composition roots use it; everything else takes a clock function as a parameter."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Return the current time, timezone-aware in UTC."""
    return datetime.now(UTC)
