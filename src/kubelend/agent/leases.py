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

RENEWAL_DIVISOR: Final = 3
"""Renew when a third of the duration is left, which leaves time for many attempts."""
RENEWAL_JITTER_DIVISOR: Final = 30
"""And up to a thirtieth of the duration earlier, so that reservations made together are not renewed
together."""
RECHECK_INTERVAL: Final = timedelta(minutes=1)
"""After the broker reported a reservation as live that should have expired by the local count."""

_ZERO: Final = timedelta()


def renewal_margin(duration: timedelta, chance: float) -> timedelta:
    """How much of a duration is left when it is renewed; `chance` is from 0 to 1."""
    return duration / RENEWAL_DIVISOR + duration / RENEWAL_JITTER_DIVISOR * chance


class ExpiryTracker:
    """Expiry times in the event loop's time."""

    def __init__(self, clock: Callable[[], datetime], chance: Callable[[], float]) -> None:
        self._clock = clock
        self._chance = chance
        self._entries: dict[str, _ExpiryEntry] = {}

    def confirm(self, body: bodies.Reservation) -> None:
        """The broker has just restarted the duration because of the agent's own call."""
        duration = _reservation_duration(body)
        if duration is None or body.status.expires_at is None:
            return
        self._entries[body.id] = self._new_entry(
            body.status.expires_at, duration, duration, is_exact=True
        )

    def observe(self, body: bodies.Reservation) -> None:
        """Observe the expiry, or the end of the queueing time, that the broker reports. A changed
        end shifts the local one.
        """
        end, duration = _end_time(body), _reservation_duration(body)
        known = self._entries.get(body.id)
        if end is None:
            self.forget(body.id)
        elif known is None or (known.duration == _ZERO) != (duration is None):
            left = max(end - self._clock(), _ZERO)
            left = left if duration is None else min(left, duration)
            self._entries[body.id] = self._new_entry(end, left, duration or _ZERO, is_exact=False)
        elif known.end != end:
            moved = (end - known.end).total_seconds()
            self._entries[body.id] = replace(known, end=end, ends_at=known.ends_at + moved)

    def recheck(self, reservation: str) -> None:
        """The broker reports it as live: the local count was wrong by an unknown amount."""
        known = self._entries.get(reservation)
        if known is not None:
            ends_at = _loop_time() + RECHECK_INTERVAL.total_seconds()
            self._entries[reservation] = replace(known, ends_at=ends_at)

    def forget(self, reservation: str) -> None:
        self._entries.pop(reservation, None)

    def remaining(self, reservation: str) -> timedelta | None:
        """Until it expires or its queueing time ends; zero if that has passed, None if it has no
        end.
        """
        known = self._entries.get(reservation)
        if known is None:
            return None
        return max(timedelta(seconds=known.ends_at - _loop_time()), _ZERO)

    def time_to_renewal(self, reservation: str) -> timedelta | None:
        """Until the renewal is due; zero if it is. Due at once if the remaining time is not known
        exactly.
        """
        known, left = self._entries.get(reservation), self.remaining(reservation)
        if known is None or left is None or known.duration == _ZERO:
            return None
        return max(left - known.renewal_margin, _ZERO) if known.is_exact else _ZERO

    def _new_entry(
        self, end: datetime, remaining: timedelta, duration: timedelta, *, is_exact: bool
    ) -> _ExpiryEntry:
        ends_at = _loop_time() + remaining.total_seconds()
        return _ExpiryEntry(
            end, ends_at, duration, renewal_margin(duration, self._chance()), is_exact
        )


class _ExpiryEntry(msgspec.Struct, frozen=True):
    end: datetime
    """In the broker's time."""
    ends_at: float
    """In the event loop's time."""
    duration: timedelta
    """Zero for a queued reservation, which is not renewed."""
    renewal_margin: timedelta
    is_exact: bool


def _end_time(body: bodies.Reservation) -> datetime | None:
    return body.status.expires_at or body.status.wait_until


def _reservation_duration(body: bodies.Reservation) -> timedelta | None:
    if body.status.expires_at is None:
        return None
    try:
        return durations.parse_duration(body.duration)
    except InvalidDuration:  # older brokers do not send it: use the initial duration
        return body.status.expires_at - (body.status.reserved_at or body.created_at)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
