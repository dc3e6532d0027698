"""How long each reservation lasts, counted so that a clock which is wrong by an hour does no harm.

When the broker has just counted a duration anew, at our own call, its whole duration is left: that needs no
clock. Only for a reservation that was made before this process began is the broker's time compared with
ours, once; everything after that is counted by the event loop. And no count of ours ends a reservation:
when one is over the broker is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import msgspec
from msgspec.structs import replace

from kubelend.core import durations
from kubelend.core.errors import InvalidDuration
from kubelend.wire import bodies

RENEWED_WITH: Final = 3
"""It is renewed when a third of its duration is left: time for many tries."""
JITTER: Final = 30
"""And up to a thirtieth earlier, lest those that were made together are renewed together for ever."""
ASKED_AGAIN: Final = timedelta(minutes=1)
"""After the broker said that one lives which should be over by our count."""

_NONE: Final = timedelta()


def renewal_left(duration: timedelta, chance: float) -> timedelta:
    """What is left of a duration when it is time to renew; `chance` is from 0 to 1."""
    return duration / RENEWED_WITH + duration / JITTER * chance


class Leases:
    """The ends of reservations, by the time of the event loop."""

    def __init__(self, clock: Callable[[], datetime], chance: Callable[[], float]) -> None:
        self._clock = clock
        self._chance = chance
        self._known: dict[str, _Lease] = {}

    def confirm(self, body: bodies.Reservation) -> None:
        """The broker has counted its duration from this moment on, because we called."""
        duration = _duration(body)
        if duration is None or body.status.expires_at is None:
            return
        self._known[body.id] = self._lease(body.status.expires_at, duration, duration, is_sure=True)

    def hear(self, body: bodies.Reservation) -> None:
        """Somebody says how long it, or its wait, lasts. A later end moves ours by as much."""
        end, duration = _end(body), _duration(body)
        known = self._known.get(body.id)
        if end is None:
            self.forget(body.id)
        elif known is None or (known.duration == _NONE) != (duration is None):
            left = max(end - self._clock(), _NONE)
            left = left if duration is None else min(left, duration)
            self._known[body.id] = self._lease(end, left, duration or _NONE, is_sure=False)
        elif known.end != end:
            moved = (end - known.end).total_seconds()
            self._known[body.id] = replace(known, end=end, ends_at=known.ends_at + moved)

    def doubt(self, reservation: str) -> None:
        """The broker says that it lives: our count was wrong, and nobody knows by how much."""
        known = self._known.get(reservation)
        if known is not None:
            ends_at = _now() + ASKED_AGAIN.total_seconds()
            self._known[reservation] = replace(known, ends_at=ends_at)

    def forget(self, reservation: str) -> None:
        self._known.pop(reservation, None)

    def left(self, reservation: str) -> timedelta | None:
        """Until its end, or that of its wait; zero if that has passed, None if it has none."""
        known = self._known.get(reservation)
        if known is None:
            return None
        return max(timedelta(seconds=known.ends_at - _now()), _NONE)

    def until_renewal(self, reservation: str) -> timedelta | None:
        """Until it is time to renew; zero if it is. At once if we cannot be sure how long it lasts."""
        known, left = self._known.get(reservation), self.left(reservation)
        if known is None or left is None or known.duration == _NONE:
            return None
        return max(left - known.early, _NONE) if known.is_sure else _NONE

    def _lease(
        self, end: datetime, left: timedelta, duration: timedelta, *, is_sure: bool
    ) -> _Lease:
        ends_at = _now() + left.total_seconds()
        return _Lease(end, ends_at, duration, renewal_left(duration, self._chance()), is_sure)


class _Lease(msgspec.Struct, frozen=True):
    end: datetime
    """In the broker's time."""
    ends_at: float
    """In the event loop's."""
    duration: timedelta
    """Zero for one that waits: there is nothing to renew."""
    early: timedelta
    is_sure: bool


def _end(body: bodies.Reservation) -> datetime | None:
    return body.status.expires_at or body.status.wait_until


def _duration(body: bodies.Reservation) -> timedelta | None:
    if body.status.expires_at is None:
        return None
    try:
        return durations.parse(body.duration)
    except InvalidDuration:  # of a broker that does not say: as long as it was given at first
        return body.status.expires_at - (body.status.reserved_at or body.created_at)


def _now() -> float:
    return asyncio.get_running_loop().time()
