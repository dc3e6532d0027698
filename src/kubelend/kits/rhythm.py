"""Coalescing of frequent callbacks.

A process that wakes up for each of hundreds of requests per second spends most of its time on cache misses;
handling several per wake-up avoids this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Action = Callable[[], None]


class CoalescingTimer:
    """Runs a rare action immediately; batches frequent ones until the next tick."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")
        self._pending: list[Action] = []

    def schedule(self, action: Action) -> None:
        """Run the action now, or together with others within `seconds`."""
        loop = asyncio.get_running_loop()
        is_often = loop.time() - self._last < self._seconds
        self._last = loop.time()
        if not is_often:
            action()
            return
        if not self._pending:
            loop.call_later(self._seconds, self._fire)
        self._pending.append(action)

    def _fire(self) -> None:
        waiting, self._pending = self._pending, []
        loop = asyncio.get_running_loop()
        for action in waiting:
            loop.call_soon(
                action
            )  # via the loop, so that one failing action does not affect the others
