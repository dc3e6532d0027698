"""When a cluster advertises: at moments of the wall clock that are its own, whenever it was started.

Many agents that were started together would otherwise call the broker together, for ever. The publisher
asks for the next moment after each advertisement.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Final

ON_THE_CLOCK: Final = timedelta()
"""The offset at which every interval that divides a minute meets the full minute."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def offset(cluster: str, interval: timedelta) -> timedelta:
    """How far behind the full interval a cluster's moments are: always the same, and spread evenly."""
    number = int.from_bytes(hashlib.sha256(cluster.encode()).digest(), "big")
    return number % (interval // _MICROSECOND) * _MICROSECOND


def next_moment(earliest: datetime, interval: timedelta, offset: timedelta) -> datetime:
    """The first moment that is not before `earliest`."""
    since = earliest - _EPOCH - offset
    return earliest + (-since) % interval
