"""Tracks when each reservation expires and has to be renewed, independent of clock skew.

Right after the agent itself reserved or renewed, the whole duration is left: that needs no clock. Only
for a reservation from before this process started is the broker's time compared with the local clock,
once; everything after that is counted by the event loop. No local count ends a reservation: the broker
is asked.
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
"""Renew when a third of the duration is left, which leaves time for many attempts."""
JITTER: Final = 30
"""And up to a thirtieth of the duration earlier, so that reservations made together are not renewed
together."""
ASKED_AGAIN: Final = timedelta(minutes=1)
"""After the broker reported a reservation as live that should have expired by the local count."""

_NONE: Final = timedelta()


def renewal_left(duration: timedelta, chance: float) -> timedelta:
    """How much of a duration is left when it is renewed; `chance` is from 0 to 1."""
    return duration / RENEWED_WITH + duration / JITTER * chance


class Leases:
    """Expiry times in the event loop's time."""

    def __init__(self, clock: Callable[[], datetime], chance: Callable[[], float]) -> None:
        self._clock = clock
        self._chance = chance
        self._known: dict[str, _Lease] = {}

    def confirm(self, body: bodies.Reservation) -> None:
        """The broker has just restarted the duration because of the agent's own call."""
        duration = _duration(body)
        if duration is None or body.status.expires_at is None:
            return
        self._known[body.id] = self._lease(body.status.expires_at, duration, duration, is_sure=True)

    def hear(self, body: bodies.Reservation) -> None:
        """Observe the expiry, or the end of the queueing time, that the broker reports. A changed
        end shifts the local one.
        """
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
        """The broker reports it as live: the local count was wrong by an unknown amount."""
        known = self._known.get(reservation)
        if known is not None:
            ends_at = _now() + ASKED_AGAIN.total_seconds()
            self._known[reservation] = replace(known, ends_at=ends_at)

    def forget(self, reservation: str) -> None:
        self._known.pop(reservation, None)

    def left(self, reservation: str) -> timedelta | None:
        """Until it expires or its queueing time ends; zero if that has passed, None if it has no
        end.
        """
        known = self._known.get(reservation)
        if known is None:
            return None
        return max(timedelta(seconds=known.ends_at - _now()), _NONE)

    def until_renewal(self, reservation: str) -> timedelta | None:
        """Until the renewal is due; zero if it is. Due at once if the remaining time is not known
        exactly.
        """
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
    """In the event loop's time."""
    duration: timedelta
    """Zero for a queued reservation, which is not renewed."""
    early: timedelta
    is_sure: bool


def _end(body: bodies.Reservation) -> datetime | None:
    return body.status.expires_at or body.status.wait_until


def _duration(body: bodies.Reservation) -> timedelta | None:
    if body.status.expires_at is None:
        return None
    try:
        return durations.parse(body.duration)
    except InvalidDuration:  # older brokers do not send it: use the initial duration
        return body.status.expires_at - (body.status.reserved_at or body.created_at)


def _now() -> float:
    return asyncio.get_running_loop().time()
