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

LOCK_SLACK: Final = timedelta(seconds=1)
"""How much longer a waiter waits than the holder may run, so that it gets the holder's error and not
a timeout."""


class TimeBudget:
    """The time left for the commands of the lock holder."""

    def __init__(self, cluster: str, limit: timedelta, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._limit = limit
        self._now = now
        self._end = now() + limit.total_seconds()

    def remaining(self, limit: timedelta) -> timedelta:
        """For the next command, at most `limit`; `Unavailable` if no time is left."""
        left = timedelta(seconds=round(self._end - self._now(), 2))  # also shown to people
        if left <= timedelta():
            raise Unavailable(
                f"peering commands for {self._cluster} exceeded {durations.format_duration_short(self._limit)}"
            )
        return min(left, limit)


class ProviderLocks:
    """The lock of each provider, with its waiters."""

    def __init__(self, limit: timedelta, now: Callable[[], float]) -> None:
        """`limit` is for the commands of one holder, and as much for waiting; `now` returns seconds."""
        self._limit = limit
        self._now = now
        self._waiters: dict[str, _Waiters] = {}
        """The waiters of each provider whose lock is held."""

    @asynccontextmanager
    async def acquire(self, cluster: str, *, is_urgent: bool = False) -> AsyncIterator[TimeBudget]:
        """Acquire the lock; `Unavailable` if that takes too long. An urgent caller goes before all
        others.
        """
        await self._lock(cluster, is_urgent)
        try:
            yield TimeBudget(cluster, self._limit, self._now)
        finally:
            self._release(cluster)

    async def _lock(self, cluster: str, is_urgent: bool) -> None:
        line = self._waiters.get(cluster)
        if line is None:
            self._waiters[cluster] = _Waiters()
            return
        try:
            async with asyncio.timeout((self._limit + LOCK_SLACK).total_seconds()):
                await self._wait_in_queue(line, cluster, is_urgent)
        except TimeoutError:
            raise Unavailable(
                f"another peering command for {cluster} is still running after {durations.format_duration_short(self._limit)}"
            ) from None

    async def _wait_in_queue(self, waiters: _Waiters, cluster: str, is_urgent: bool) -> None:
        called = asyncio.get_running_loop().create_future()
        waiting = waiters.urgent if is_urgent else waiters.others
        waiting.append(called)
        try:
            await called
        except asyncio.CancelledError:
            if called.cancelled():
                with contextlib.suppress(ValueError):
                    waiting.remove(called)
            else:  # acquired at the same moment
                self._release(cluster)
            raise

    def _release(self, cluster: str) -> None:
        line = self._waiters[cluster]
        for waiting in (line.urgent, line.others):
            while waiting:
                called = waiting.popleft()
                if not called.done():
                    called.set_result(None)
                    return
        del self._waiters[cluster]


class _Waiters:
    """Waiters, in order of arrival."""

    __slots__ = ("others", "urgent")

    def __init__(self) -> None:
        self.urgent: deque[asyncio.Future[None]] = deque()
        self.others: deque[asyncio.Future[None]] = deque()
