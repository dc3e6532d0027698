"""The advertising schedule: wall-clock times with an offset per cluster, independent of when the
agent started.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Final

NO_OFFSET: Final = timedelta()
"""No offset: intervals that divide a minute start at the full minute."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def advertising_offset(cluster: str, interval: timedelta) -> timedelta:
    """The cluster's offset within the interval: constant, and evenly distributed over clusters."""
    number = int.from_bytes(hashlib.sha256(cluster.encode()).digest(), "big")
    return number % (interval // _MICROSECOND) * _MICROSECOND


def next_scheduled(earliest: datetime, interval: timedelta, offset: timedelta) -> datetime:
    """The first scheduled time that is not before `earliest`."""
    since = earliest - _EPOCH - offset
    return earliest + (-since) % interval
