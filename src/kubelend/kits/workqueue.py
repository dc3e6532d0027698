"""A workqueue of object keys, as in client-go: deduplicated, one worker per key, delayed retries.

Reconcilers are level-triggered: an event only enqueues a key. A key added while it is being processed is
processed once more afterwards, so no change is missed and no object is reconciled twice at the same time. A
reconcile that hangs does not block other keys.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable
from datetime import timedelta
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST, LONGEST = timedelta(milliseconds=500), timedelta(minutes=1)


class Workqueue(Generic[Key]):
    """Enqueue keys with `add`; run `run` as a task."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._waiting: dict[Key, None] = {}
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._pausing: set[Key] = set()
        """Keys in backoff after a failure, without a Retry-After of the server."""
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Number of keys that are ready; delayed keys are not counted."""
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Enqueue a key. If it is being processed, it is processed again afterwards."""
        self._cancel(key)
        self._pausing.discard(key)
        if key in self._busy:
            self._again.add(key)
        else:
            self._waiting[key] = None
            self._news.set()

    def add_after(self, key: Key, delay: timedelta) -> None:
        """Enqueue a key after a delay, unless it is due earlier anyway."""
        if key in self._waiting or key in self._again:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(delay.total_seconds(), 0)
        known = self._timers.get(key)
        if known is None or due < known.when():
            self._cancel(key)
            self._timers[key] = loop.call_at(due, self.add, key)

    def retry(self, key: Key, at_least: timedelta = timedelta()) -> timedelta:
        """Enqueue a key with exponential backoff; return the delay.

        `at_least` is a minimum, such as a server's Retry-After.
        """
        tried = self._failures.get(key, 0)
        self._failures[key] = tried + 1
        pause: timedelta = min(FIRST * 2 ** min(tried, 20), LONGEST) * (1 - self._chance() / 2)
        pause = max(pause, at_least)
        self.add_after(key, pause)
        if key in self._timers and not at_least:
            self._pausing.add(key)
        return pause

    def hurry(self) -> None:
        """Enqueue all keys in backoff now, for example after a reconnect. Their failure counts stay.

        Keys with a minimum delay keep it.
        """
        for key in list(self._pausing):
            self.add(key)

    def forget(self, key: Key) -> None:
        """Reset the failure count of a key."""
        self._failures.pop(key, None)

    async def work(self, handle: Callable[[Key], Awaitable[None]]) -> None:
        """Process keys concurrently until cancelled. An exception of `handle` ends it."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    key = await self._next()
                    self._busy.add(key)
                    group.create_task(self._handle(key, handle))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _next(self) -> Key:
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        return key

    async def _handle(self, key: Key, handle: Callable[[Key], Awaitable[None]]) -> None:
        try:
            await handle(key)
        finally:
            self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _cancel(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
