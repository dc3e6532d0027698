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

FIRST_DELAY, MAX_DELAY = timedelta(milliseconds=500), timedelta(minutes=1)


class Workqueue(Generic[Key]):
    """Enqueue keys with `add`; run `run` as a task."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._ready: dict[Key, None] = {}
        self._processing: set[Key] = set()
        self._dirty: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._in_backoff: set[Key] = set()
        """Keys in backoff after a failure, without a Retry-After of the server."""
        self._wakeup = asyncio.Event()

    def __len__(self) -> int:
        """Number of keys that are ready; delayed keys are not counted."""
        return len(self._ready)

    def add(self, key: Key) -> None:
        """Enqueue a key. If it is being processed, it is processed again afterwards."""
        self._cancel_timer(key)
        self._in_backoff.discard(key)
        if key in self._processing:
            self._dirty.add(key)
        else:
            self._ready[key] = None
            self._wakeup.set()

    def add_after(self, key: Key, delay: timedelta) -> None:
        """Enqueue a key after a delay, unless it is due earlier anyway."""
        if key in self._ready or key in self._dirty:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(delay.total_seconds(), 0)
        known = self._timers.get(key)
        if known is None or due < known.when():
            self._cancel_timer(key)
            self._timers[key] = loop.call_at(due, self.add, key)

    def retry(self, key: Key, at_least: timedelta = timedelta()) -> timedelta:
        """Enqueue a key with exponential backoff; return the delay.

        `at_least` is a minimum, such as a server's Retry-After.
        """
        tried = self._failures.get(key, 0)
        self._failures[key] = tried + 1
        pause: timedelta = min(FIRST_DELAY * 2 ** min(tried, 20), MAX_DELAY) * (
            1 - self._chance() / 2
        )
        pause = max(pause, at_least)
        self.add_after(key, pause)
        if key in self._timers and not at_least:
            self._in_backoff.add(key)
        return pause

    def retry_now(self) -> None:
        """Enqueue all keys in backoff now, for example after a reconnect. Their failure counts stay.

        Keys with a minimum delay keep it.
        """
        for key in list(self._in_backoff):
            self.add(key)

    def forget(self, key: Key) -> None:
        """Reset the failure count of a key."""
        self._failures.pop(key, None)

    async def run(self, handle: Callable[[Key], Awaitable[None]]) -> None:
        """Process keys concurrently until cancelled. An exception of `handle` ends it."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    key = await self._next()
                    self._processing.add(key)
                    group.create_task(self._handle(key, handle))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _next(self) -> Key:
        while not self._ready:
            self._wakeup.clear()
            await self._wakeup.wait()
        key = next(iter(self._ready))
        del self._ready[key]
        return key

    async def _handle(self, key: Key, handle: Callable[[Key], Awaitable[None]]) -> None:
        try:
            await handle(key)
        finally:
            self._processing.discard(key)
            if key in self._dirty:
                self._dirty.discard(key)
                self.add(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
