"""What time alone brings about: when something is next to be looked at, though nothing happens.

The parts of the broker that look at objects each have one, and ask it once a tick.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

TICK: Final = 1.0
"""Seconds. By so much what only time tells may be noticed late; it is judged by the clock all the same."""


class Alarm:
    """Rings at the earliest of the moments for which it was set, until it is turned off."""

    def __init__(self) -> None:
        self._at = _NEVER

    def set(self, at: datetime) -> None:
        self._at = min(self._at, at)

    def turn_off(self) -> None:
        self._at = _NEVER

    def rings(self, now: datetime) -> bool:
        return self._at <= now

    def is_over(self, due: datetime | None, now: datetime) -> bool:
        """Whether it is time for one thing; if it is to come, the alarm is set for it."""
        if due is not None and due > now:
            self.set(due)
        return due is not None and due <= now


_NEVER: Final = datetime.max.replace(tzinfo=UTC)
