"""Rate limits: token bucket, log throttle and coalescing timer.

Log messages that a remote client can cause (a rejected handshake, a rate-limited request) go through
`LogThrottle`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

LOG_INTERVAL = 10.0
"""Seconds between two log lines with one key."""

MAX_LOG_KEYS = 4096
"""Maximum number of keys. Beyond it the oldest is evicted, and its next line is logged early."""


class LogThrottle:
    """Allows one log line per key and interval, and counts the suppressed ones."""

    def __init__(
        self, interval: float = LOG_INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._intervals: dict[Hashable, _LogInterval] = {}

    def suppressed(self, key: Hashable) -> int | None:
        """Return the number of lines suppressed since the last one; None if this line is suppressed too."""
        now = self._clock()
        known = self._intervals.get(key)
        if known is not None and now < known.until:
            known.suppressed += 1
            return None
        self._start_interval(key, now)
        return 0 if known is None else known.suppressed

    def _start_interval(self, key: Hashable, now: float) -> None:
        # Removed first, so that the dictionary stays ordered by time and its first key is the oldest.
        self._intervals.pop(key, None)
        self._intervals[key] = _LogInterval(now + self._interval)
        if len(self._intervals) > MAX_LOG_KEYS:
            del self._intervals[next(iter(self._intervals))]


class _LogInterval:
    __slots__ = ("suppressed", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.suppressed = 0
