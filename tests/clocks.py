"""The clocks of tests, which stand still: dates for brokers, seconds for rate limits and backoffs."""

from __future__ import annotations

from datetime import datetime, timedelta

import make
from kubelend.kits import clock


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now: datetime = make.T0) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def pass_time(self, duration: timedelta) -> None:
        self.now += duration


class RunningClock(Clock):
    """Goes as the machine's does, and can be moved ahead of it."""

    def __init__(self) -> None:
        super().__init__(clock.utc_now())
        self._ahead = timedelta()

    def __call__(self) -> datetime:
        return clock.utc_now() + self._ahead

    def pass_time(self, duration: timedelta) -> None:
        self._ahead += duration


class Seconds:
    """Like `time.monotonic`, but stands still until `now` is set."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
