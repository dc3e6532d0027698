"""Timestamps as integer microseconds, which fit numpy columns and allow exact cost arithmetic."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
HOUR_MICROS: Final = 3_600_000_000
"""In microseconds, as all integers of this module."""
DAY_MICROS: Final = 24 * HOUR_MICROS

_MICROSECOND: Final = timedelta(microseconds=1)


def to_micros(at: datetime) -> int:
    """Microseconds since the Unix epoch."""
    return (at - EPOCH) // _MICROSECOND


def from_micros(at: int) -> datetime:
    """The inverse of `to_micros`."""
    return EPOCH + timedelta(microseconds=at)


def format_time(at: datetime, now: datetime) -> str:
    """Formats a timestamp for messages; the date is omitted if it is today."""
    return f"{at:%H:%M:%S} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S} UTC"
