"""Rate limits: token bucket, log throttle and coalescing timer.

Log messages that a remote client can cause (a rejected handshake, a rate-limited request) go through
`LogThrottle`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

INTERVAL = 10.0
"""Seconds between two log lines with one key."""

MOST = 4096
"""Maximum number of keys. Beyond it the oldest is evicted, and its next line is logged early."""


class Repeats:
    """Allows one log line per key and interval, and counts the suppressed ones."""

    def __init__(
        self, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._told: dict[Hashable, _Told] = {}

    def left_out(self, subject: Hashable) -> int | None:
        """Return the number of lines suppressed since the last one; None if this line is suppressed too."""
        now = self._clock()
        known = self._told.get(subject)
        if known is not None and now < known.until:
            known.left_out += 1
            return None
        self._remember(subject, now)
        return 0 if known is None else known.left_out

    def _remember(self, subject: Hashable, now: float) -> None:
        # Removed first, so that the dictionary stays ordered by time and its first key is the oldest.
        self._told.pop(subject, None)
        self._told[subject] = _Told(now + self._interval)
        if len(self._told) > MOST:
            del self._told[next(iter(self._told))]


class _Told:
    __slots__ = ("left_out", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.left_out = 0
