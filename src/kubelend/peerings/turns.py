"""One at a time for each provider, for a bounded time, and with a way past those who wait.

`peerings.liqoctl` takes a turn for all that it runs: two runs of liqoctl for one provider would undo each
other's work. A provider that hangs makes turns long, so nobody waits for more than one of them to end, and
whoever wants to part from it goes before those who want to join with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from kubelend.core import durations
from kubelend.core.errors import Unavailable

SLACK: Final = timedelta(seconds=1)
"""What a turn may take longer, for the end of what has run. Who came with it then hears why it failed."""


class Turn:
    """The time that is left for one's own work."""

    def __init__(self, cluster: str, limit: timedelta, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._limit = limit
        self._now = now
        self._end = now() + limit.total_seconds()

    def left(self, most: timedelta) -> timedelta:
        """For the next command, `most` at most; `Unavailable` if nothing is left."""
        left = timedelta(seconds=round(self._end - self._now(), 2))  # people read it, too
        if left <= timedelta():
            raise Unavailable(
                f"{self._cluster} has not been dealt with in {durations.short(self._limit)}"
            )
        return min(left, most)


class Turns:
    """Who has a turn, and who waits for one, by provider."""

    def __init__(self, limit: timedelta, now: Callable[[], float]) -> None:
        """`limit` is for one's own turn, and as much for waiting; `now` gives seconds."""
        self._limit = limit
        self._now = now
        self._lines: dict[str, _Line] = {}
        """Of the providers with whom something is being done."""

    @asynccontextmanager
    async def turn(self, cluster: str, *, is_urgent: bool = False) -> AsyncIterator[Turn]:
        """`Unavailable` if it does not come in time. An urgent one comes after the present one."""
        await self._wait(cluster, is_urgent)
        try:
            yield Turn(cluster, self._limit, self._now)
        finally:
            self._pass_on(cluster)

    async def _wait(self, cluster: str, is_urgent: bool) -> None:
        line = self._lines.get(cluster)
        if line is None:
            self._lines[cluster] = _Line()
            return
        try:
            async with asyncio.timeout((self._limit + SLACK).total_seconds()):
                await self._stand_in(line, cluster, is_urgent)
        except TimeoutError:
            raise Unavailable(
                f"another command for {cluster} is running, for {durations.short(self._limit)}"
            ) from None

    async def _stand_in(self, line: _Line, cluster: str, is_urgent: bool) -> None:
        called = asyncio.get_running_loop().create_future()
        waiting = line.urgent if is_urgent else line.others
        waiting.append(called)
        try:
            await called
        except asyncio.CancelledError:
            if called.cancelled():
                with contextlib.suppress(ValueError):
                    waiting.remove(called)
            else:  # called in the very moment
                self._pass_on(cluster)
            raise

    def _pass_on(self, cluster: str) -> None:
        line = self._lines[cluster]
        for waiting in (line.urgent, line.others):
            while waiting:
                called = waiting.popleft()
                if not called.done():
                    called.set_result(None)
                    return
        del self._lines[cluster]


class _Line:
    """Those who wait, while somebody has the turn."""

    __slots__ = ("others", "urgent")

    def __init__(self) -> None:
        self.urgent: deque[asyncio.Future[None]] = deque()
        self.others: deque[asyncio.Future[None]] = deque()
