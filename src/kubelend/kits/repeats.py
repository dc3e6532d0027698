"""Lines that one subject could repeat as often as it likes: one now and then, and a count of the others.

Whoever logs what a stranger can bring about (a refused handshake, a call over the limit) asks here first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

INTERVAL = 10.0
"""Seconds between two lines about one subject."""

MOST = 4096
"""Subjects remembered. Of more the oldest is forgotten, and its next line comes early."""


class Repeats:
    """Remembers what was said of whom."""

    def __init__(
        self, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._told: dict[Hashable, _Told] = {}

    def left_out(self, subject: Hashable) -> int | None:
        """How many lines about it were left out since the last one; None if this one is left out too."""
        now = self._clock()
        told = self._told.get(subject)
        if told is not None and now < told.until:
            told.left_out += 1
            return None
        self._remember(subject, now)
        return 0 if told is None else told.left_out

    def _remember(self, subject: Hashable, now: float) -> None:
        # Taken out first: so the order is that of time, and the first is the oldest.
        self._told.pop(subject, None)
        self._told[subject] = _Told(now + self._interval)
        if len(self._told) > MOST:
            del self._told[next(iter(self._told))]


class _Told:
    __slots__ = ("left_out", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.left_out = 0
