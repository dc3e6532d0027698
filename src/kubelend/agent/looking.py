"""The building blocks of the agent's controllers: watch, reconcile queue, and updates with retry on
conflict.

A reconcile that takes long, or fails with a `KubelendError`, delays its own object only; any other
exception is a bug and ends the task.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

import structlog

from kubelend.agent import verdicts
from kubelend.agent.ports import Deleted, Listed, LocalObjects
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.kits.workqueue import Workqueue
from kubelend.wire.objects import Kind

log = structlog.get_logger("kubelend.agent")

_WATCH_BACKOFF: Final = Backoff(retries=2**31, first=timedelta(milliseconds=500))


class ReconcileQueue:
    """Reconciles keys one at a time each, and retries failures with backoff. Logs a failure once,
    not per retry.
    """

    def __init__(
        self,
        kind: str,
        reconcile: Callable[[str], Awaitable[None]],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._kind = kind
        self._reconcile = reconcile
        self._queue: Workqueue[str] = Workqueue(chance)
        self._errors: dict[str, str] = {}

    def add(self, key: str) -> None:
        self._queue.add(key)

    def add_after(self, key: str, delay: timedelta) -> None:
        self._queue.add_after(key, delay)

    def retry_now(self) -> None:
        """Retry failed keys now instead of after their backoff."""
        self._queue.retry_now()

    async def run(self) -> None:
        """Runs until cancelled."""
        await self._queue.run(self._reconcile_once)

    async def _reconcile_once(self, key: str) -> None:
        try:
            await self._reconcile(key)
        except KubelendError as error:
            delay = verdicts.retry_after(error)
            self._queue.retry(key, delay)
            if self._errors.get(key) != error.code:
                self._errors[key] = error.code
                log.warning(
                    "Reconcile failed, will retry",
                    kind=self._kind,
                    name=key,
                    error=str(error),
                    retry_after=delay.total_seconds(),
                )
        else:
            self._queue.forget(key)
            if self._errors.pop(key, None) is not None:
                log.info("Reconcile recovered", kind=self._kind, name=key)


async def watch_objects(
    objects: LocalObjects,
    kind: type[Kind],
    on_event: Callable[[Kind | Deleted | Listed], None],
    on_error: Callable[[str], None],
    chance: Callable[[], float],
) -> None:
    """Watch a kind, and hand each event to `on_event`. Runs until cancelled.

    `on_error` is called with the watch error, and with an empty text while the watch works.
    """
    pauses = _WATCH_BACKOFF.delays(chance)
    while True:
        try:
            async with contextlib.aclosing(objects.watch(kind)) as events:
                async for event in events:
                    on_error("")
                    pauses = _WATCH_BACKOFF.delays(chance)
                    on_event(event)
            raise Unavailable("the watch ended")
        except KubelendError as error:
            on_error(f"cannot watch {kind.plural}: {error}")
        await asyncio.sleep(next(pauses))
