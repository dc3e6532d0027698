"""Looking at one object at a time: a look that fails is repeated, and told once and not at every try.

Both controllers are made of it. An object that does not fit the types is left alone, so that nobody can stop
the broker with one. Anything else but an error of ours is a mistake in the code, and ends the task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

import msgspec
import structlog

from kubelend.core.errors import KubelendError, LimitExceeded, Unavailable
from kubelend.kits.workqueue import Workqueue

log = structlog.get_logger("kubelend.controllers")


class Looks:
    """Names of objects of one kind, each looked at by one worker at a time."""

    def __init__(self, kind: str, look: Callable[[str], Awaitable[None]]) -> None:
        self._kind = kind
        self._look = look
        self._queue: Workqueue[str] = Workqueue()
        self._problems: dict[str, str] = {}

    def add(self, name: str) -> None:
        self._queue.add(name)

    def add_after(self, name: str, delay: timedelta) -> None:
        self._queue.add_after(name, delay)

    async def run(self) -> None:
        """For ever."""
        await self._queue.work(self._attempt)

    async def _attempt(self, name: str) -> None:
        try:
            await self._look(name)
        except KubelendError as error:
            self._queue.retry(name, _patience(error))
            self._complain("has to wait", name, error.code, error)
        except msgspec.MsgspecError as error:  # to look again would not help until it is changed
            self._queue.forget(name)
            self._complain("makes no sense, and is left alone", name, str(error), error)
        else:
            self._queue.forget(name)
            if self._problems.pop(name, None) is not None:
                log.info("waits no longer", kind=self._kind, object=name)

    def _complain(self, what: str, name: str, problem: str, error: Exception) -> None:
        if self._problems.get(name) != problem:
            self._problems[name] = problem
            log.warning(what, kind=self._kind, object=name, problem=str(error))


def _patience(error: KubelendError) -> timedelta:
    """What somebody asked to be left in peace for."""
    asked = error.retry_after if isinstance(error, LimitExceeded | Unavailable) else 0.0
    return timedelta(seconds=asked)
