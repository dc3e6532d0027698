"""Doing frequent small things together: they wait for a common beat once they come often.

Woken for each of hundreds of calls a second, a process spends most of its time finding its own code and
data again; woken for many of them at a time, it does not.
"""

from __future__ import annotations

import asyncio


class Rhythm:
    """Who comes alone goes on at once; who comes soon after another waits for the next beat."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")
        self._beat: asyncio.Event | None = None

    async def join(self) -> None:
        """Go on, now or with the others that come within the same `seconds`."""
        loop = asyncio.get_running_loop()
        is_often = loop.time() - self._last < self._seconds
        self._last = loop.time()
        if not is_often:
            return
        if self._beat is None:
            self._beat = asyncio.Event()
            loop.call_later(self._seconds, self._strike, self._beat)
        await self._beat.wait()

    def _strike(self, beat: asyncio.Event) -> None:
        self._beat = None
        beat.set()
