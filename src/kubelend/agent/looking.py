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

_PAUSES: Final = Backoff(retries=2**31, first=timedelta(milliseconds=500))


class Looks:
    """Reconciles keys one at a time each, and retries failures with backoff. Logs a failure once,
    not per retry.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[str], Awaitable[None]],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._name = name
        self._look = look
        self._queue: Workqueue[str] = Workqueue(chance)
        self._problems: dict[str, str] = {}

    def add(self, key: str) -> None:
        self._queue.add(key)

    def add_after(self, key: str, delay: timedelta) -> None:
        self._queue.add_after(key, delay)

    def hurry(self) -> None:
        """Retry failed keys now instead of after their backoff."""
        self._queue.hurry()

    async def run(self) -> None:
        """Runs until cancelled."""
        await self._queue.work(self._attempt)

    async def _attempt(self, key: str) -> None:
        try:
            await self._look(key)
        except KubelendError as error:
            delay = verdicts.patience(error)
            self._queue.retry(key, delay)
            if self._problems.get(key) != error.code:
                self._problems[key] = error.code
                log.warning(
                    "Reconcile failed, will retry",
                    kind=self._name,
                    name=key,
                    error=str(error),
                    retry_after=delay.total_seconds(),
                )
        else:
            self._queue.forget(key)
            if self._problems.pop(key, None) is not None:
                log.info("Reconcile recovered", kind=self._name, name=key)


async def follow(
    objects: LocalObjects,
    kind: type[Kind],
    take: Callable[[Kind | Deleted | Listed], None],
    report: Callable[[str], None],
    chance: Callable[[], float],
) -> None:
    """Watch a kind, and hand each event to `on_event`. Runs until cancelled.

    `on_error` is called with the watch error, and with an empty text while the watch works.
    """
    pauses = _PAUSES.delays(chance)
    while True:
        try:
            async with contextlib.aclosing(objects.watch(kind)) as events:
                async for event in events:
                    report("")
                    pauses = _PAUSES.delays(chance)
                    take(event)
            raise Unavailable("the watch ended")
        except KubelendError as error:
            report(f"cannot watch {kind.plural}: {error}")
        await asyncio.sleep(next(pauses))
