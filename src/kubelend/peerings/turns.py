"""A lock per provider, with a time limit and priority for disconnecting.

Two runs of liqoctl for one provider would undo each other's work, so each command holds the lock. A
hanging provider makes that long: a waiter gives up after one limit, and disconnecting goes before
connecting.
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
"""How much longer a waiter waits than the holder may run, so that it gets the holder's error and not
a timeout."""


class Turn:
    """The time left for the commands of the lock holder."""

    def __init__(self, cluster: str, limit: timedelta, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._limit = limit
        self._now = now
        self._end = now() + limit.total_seconds()

    def left(self, most: timedelta) -> timedelta:
        """For the next command, at most `limit`; `Unavailable` if no time is left."""
        left = timedelta(seconds=round(self._end - self._now(), 2))  # also shown to people
        if left <= timedelta():
            raise Unavailable(
                f"peering commands for {self._cluster} exceeded {durations.short(self._limit)}"
            )
        return min(left, most)


class Turns:
    """The lock of each provider, with its waiters."""

    def __init__(self, limit: timedelta, now: Callable[[], float]) -> None:
        """`limit` is for the commands of one holder, and as much for waiting; `now` returns seconds."""
        self._limit = limit
        self._now = now
        self._lines: dict[str, _Line] = {}
        """The waiters of each provider whose lock is held."""

    @asynccontextmanager
    async def turn(self, cluster: str, *, is_urgent: bool = False) -> AsyncIterator[Turn]:
        """Acquire the lock; `Unavailable` if that takes too long. An urgent caller goes before all
        others.
        """
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
                f"another peering command for {cluster} is still running after {durations.short(self._limit)}"
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
            else:  # acquired at the same moment
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
    """Waiters, in order of arrival."""

    __slots__ = ("others", "urgent")

    def __init__(self) -> None:
        self.urgent: deque[asyncio.Future[None]] = deque()
        self.others: deque[asyncio.Future[None]] = deque()
