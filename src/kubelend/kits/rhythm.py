"""Doing frequent small things together: they wait for a common beat once they come often.

Woken for each of hundreds of calls a second, a process spends most of its time finding its own code and
data again; woken for many of them at a time, it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Action = Callable[[], None]


class Rhythm:
    """What comes alone is done at once; what comes soon after another waits for the next beat."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")
        self._waiting: list[Action] = []

    def call(self, action: Action) -> None:
        """Do it now, or with the others that come within the same `seconds`."""
        loop = asyncio.get_running_loop()
        is_often = loop.time() - self._last < self._seconds
        self._last = loop.time()
        if not is_often:
            action()
            return
        if not self._waiting:
            loop.call_later(self._seconds, self._strike)
        self._waiting.append(action)

    def _strike(self) -> None:
        waiting, self._waiting = self._waiting, []
        loop = asyncio.get_running_loop()
        for action in waiting:
            loop.call_soon(action)  # not at once: one that fails must not end the others
