"""The queue of all reconcilers, as the workqueue of client-go: keys are deduplicated, one worker per key.

Reconcilers are level-triggered: an event only enqueues a key. A key added while it is being reconciled is
reconciled once more afterwards, so no change is missed and no object is reconciled twice at the same time. A
reconcile that hangs does not block other keys.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import msgspec

from kubelend.core.errors import KubelendError

Key = TypeVar("Key", bound=Hashable)

FIRST_DELAY, MAX_DELAY = timedelta(milliseconds=500), timedelta(minutes=1)


class ReconcileQueue(Generic[Key]):
    """Enqueue keys with `add`; run `run` as a task.

    A `KubelendError` is retried with backoff, and not before its `retry_after`. It is logged once, not per
    retry, and so is the recovery. An object that cannot be decoded is skipped until it changes. Any other
    exception is a bug and ends `run`.
    """

    def __init__(
        self,
        kind: str,
        reconcile: Callable[[Key], Awaitable[None]],
        log: Any,
        *,
        on_failure: Callable[[Key, KubelendError], Awaitable[None]] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`on_failure` is called with each failure, which then is not logged."""
        self._kind = kind
        self._reconcile = reconcile
        self._log = log
        self._on_failure = on_failure or self._log_failure
        self._chance = chance
        self._ready: dict[Key, None] = {}
        self._processing: set[Key] = set()
        self._dirty: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._in_backoff: set[Key] = set()
        """Keys in backoff after a failure, without a Retry-After of the server."""
        self._logged_errors: dict[Key, str] = {}
        self._wakeup = asyncio.Event()

    def __len__(self) -> int:
        """Number of keys that are ready; delayed keys are not counted."""
        return len(self._ready)

    def add(self, key: Key) -> None:
        """Enqueue a key. If it is being reconciled, it is reconciled again afterwards."""
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
        """Enqueue a key with a backoff that doubles until a reconcile succeeds; return the delay.

        `at_least` is a minimum, such as a server's Retry-After. A reconcile that calls this itself has not
        succeeded.
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

    async def run(self) -> None:
        """Reconcile keys concurrently until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    key = await self._next()
                    self._processing.add(key)
                    group.create_task(self._process(key))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _next(self) -> Key:
        while not self._ready:
            self._wakeup.clear()
            await self._wakeup.wait()
        key = next(iter(self._ready))
        del self._ready[key]
        return key

    async def _process(self, key: Key) -> None:
        try:
            await self._attempt(key)
        finally:
            self._processing.discard(key)
            if key in self._dirty:
                self._dirty.discard(key)
                self.add(key)

    async def _attempt(self, key: Key) -> None:
        try:
            await self._reconcile(key)
        except KubelendError as error:
            self.retry(key, timedelta(seconds=error.retry_after))
            await self._on_failure(key, error)
        except msgspec.MsgspecError as error:  # a retry would not help until the object is changed
            self._failures.pop(key, None)
            self._log_once("Skipping invalid object", key, str(error), error)
        else:
            if key not in self._in_backoff:
                self._failures.pop(key, None)
            if self._logged_errors.pop(key, None) is not None:
                self._log.info("Reconcile recovered", kind=self._kind, name=str(key))

    async def _log_failure(self, key: Key, error: KubelendError) -> None:
        message = "Reconcile failed, will retry"
        self._log_once(message, key, error.code, error, retry_after=error.retry_after)

    def _log_once(
        self, message: str, key: Key, cause: str, error: Exception, **keys: float
    ) -> None:
        if self._logged_errors.get(key) != cause:
            self._logged_errors[key] = cause
            self._log.warning(message, kind=self._kind, name=str(key), error=str(error), **keys)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
