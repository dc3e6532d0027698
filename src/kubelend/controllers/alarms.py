"""Tracks when time alone requires a reconcile, although no object and no record changes.

Each reconciler has one `NextDue` and checks it once per tick.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

TICK_SECONDS: Final = 1.0
"""Seconds. Changes caused by time alone are noticed at most this late; decisions use the clock itself."""


class NextDue:
    """The earliest of the moments it was set to, until it is cleared."""

    def __init__(self) -> None:
        self._at = _NEVER

    def set(self, at: datetime) -> None:
        self._at = min(self._at, at)

    def clear(self) -> None:
        self._at = _NEVER

    def is_due(self, now: datetime) -> bool:
        return self._at <= now

    def has_passed(self, due: datetime | None, now: datetime) -> bool:
        """Whether `due` has passed; if it lies in the future, it is noted."""
        if due is not None and due > now:
            self.set(due)
        return due is not None and due <= now


_NEVER: Final = datetime.max.replace(tzinfo=UTC)
