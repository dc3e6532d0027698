"""Work that may take long: each key has a worker of its own, so one that hangs keeps no other waiting.

`agent.peering` has one crew to join clusters and one to part them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from datetime import timedelta
from typing import Generic, TypeVar

from kubelend.core.errors import KubelendError
from kubelend.kits.workqueue import Workqueue

Key = TypeVar("Key", bound=Hashable)


class Crew(Generic[Key]):
    """Looks at a key when it is told to, and again after a pause where a look fails."""

    def __init__(
        self,
        look: Callable[[Key], Awaitable[None]],
        failed: Callable[[Key, KubelendError], Awaitable[None]],
    ) -> None:
        """`failed` hears of each failure. What is no error of ours ends `run`."""
        self._look = look
        self._failed = failed
        self._queue: Workqueue[Key] = Workqueue()
        self._keys: set[Key] = set()
        self._more = asyncio.Event()

    def add(self, key: Key) -> None:
        self._keys.add(key)
        self._more.set()
        self._queue.add(key)

    def add_after(self, key: Key, delay: timedelta) -> None:
        self._queue.add_after(key, delay)

    def retry(self, key: Key) -> None:
        """Look again after a pause that grows with each time, until `succeeded`."""
        self._queue.retry(key)

    def succeeded(self, key: Key) -> None:
        """Its next failure is its first."""
        self._queue.forget(key)

    def discharge(self, key: Key) -> None:
        """There is nothing more to do for it."""
        self._queue.forget(key)
        self._keys.discard(key)

    async def run(self) -> None:
        """For ever."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._hire(group)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _hire(self, group: asyncio.TaskGroup) -> None:
        workers = 0
        while True:
            while workers < len(self._keys):
                workers += 1
                group.create_task(self._queue.work(self._try))
            self._more.clear()
            await self._more.wait()

    async def _try(self, key: Key) -> None:
        try:
            await self._look(key)
        except KubelendError as error:
            self.retry(key)
            await self._failed(key, error)
