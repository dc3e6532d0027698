"""The two halves of a controller: following what happens to objects, and looking at one of them at a time.

`agent.requesting`, `agent.instructing` and `agent.providing` are made of them. A look that takes long, or
fails with an error of ours, delays that one object alone; anything else is a mistake in the code, and ends
the task with it.
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
    """Keys to look at. A look that fails is repeated, and told once and not at every try."""

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
        """What failed may work now: do not wait until its pause is over."""
        self._queue.hurry()

    async def run(self) -> None:
        """For ever."""
        await self._queue.work(self._attempt)

    async def _attempt(self, key: str) -> None:
        try:
            await self._look(key)
        except KubelendError as error:
            self._queue.retry(key, verdicts.patience(error))
            if self._problems.get(key) != error.code:
                self._problems[key] = error.code
                log.warning("has to wait", what=self._name, object=key, problem=str(error))
        else:
            self._queue.forget(key)
            if self._problems.pop(key, None) is not None:
                log.info("waits no longer", what=self._name, object=key)


async def follow(
    objects: LocalObjects,
    kind: type[Kind],
    take: Callable[[Kind | Deleted | Listed], None],
    report: Callable[[str], None],
    chance: Callable[[], float],
) -> None:
    """Hand on what happens to a kind, for ever; `report` hears why nothing can be seen, or nothing."""
    pauses = _PAUSES.delays(chance)
    while True:
        try:
            async with contextlib.aclosing(objects.watch(kind)) as events:
                async for event in events:
                    report("")
                    pauses = _PAUSES.delays(chance)
                    take(event)
            raise Unavailable("the watch has ended")
        except KubelendError as error:
            report(f"cannot see {kind.plural}: {error}")
        await asyncio.sleep(next(pauses))
