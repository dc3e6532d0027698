"""Instants and days as whole numbers: they fit a column, and money can be counted by them exactly."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
HOUR: Final = 3_600_000_000
"""Microseconds, as all numbers here are."""
DAY: Final = 24 * HOUR

_MICROSECOND: Final = timedelta(microseconds=1)


def micros(at: datetime) -> int:
    """Microseconds since 1970."""
    return (at - EPOCH) // _MICROSECOND


def instant(at: int) -> datetime:
    """The inverse of `micros`."""
    return EPOCH + timedelta(microseconds=at)


def time_of_day(at: datetime, now: datetime) -> str:
    """An instant as it is told to people: with its date, unless that is today's."""
    return f"{at:%H:%M:%S} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def day_of(at: datetime) -> int:
    """The number of the UTC day that an instant falls into."""
    return micros(at) // DAY
