"""Work that may take long, whose failures are for its owner to tell. One that hangs keeps no other waiting.

`agent.peering` has one crew to join clusters and one to part them.
"""

from __future__ import annotations

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

    def add(self, key: Key) -> None:
        self._queue.add(key)

    def add_after(self, key: Key, delay: timedelta) -> None:
        self._queue.add_after(key, delay)

    def retry(self, key: Key) -> None:
        """Look again after a pause that grows with each time, until `succeeded`."""
        self._queue.retry(key)

    def hurry(self) -> None:
        """What failed may work now."""
        self._queue.hurry()

    def succeeded(self, key: Key) -> None:
        """Its next failure is its first."""
        self._queue.forget(key)

    async def run(self) -> None:
        """For ever."""
        await self._queue.work(self._attempt)

    async def _attempt(self, key: Key) -> None:
        try:
            await self._look(key)
        except KubelendError as error:
            self.retry(key)
            await self._failed(key, error)
