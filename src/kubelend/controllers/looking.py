"""Work queue of object names with one reconcile at a time per name.

A failed reconcile is retried with backoff, and logged once per cause, not at each attempt.
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
    """Reconciles objects of one kind by name."""

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
        """Runs until cancelled."""
        await self._queue.work(self._attempt)

    async def _attempt(self, name: str) -> None:
        try:
            await self._look(name)
        except KubelendError as error:
            self._queue.retry(name, _patience(error))
            self._complain("Reconcile failed, will retry", name, error.code, error)
        except msgspec.MsgspecError as error:  # a retry would not help until the object is changed
            self._queue.forget(name)
            self._complain("Skipping invalid object", name, str(error), error)
        else:
            self._queue.forget(name)
            if self._problems.pop(name, None) is not None:
                log.info("Reconcile recovered", kind=self._kind, name=name)

    def _complain(self, what: str, name: str, problem: str, error: Exception) -> None:
        if self._problems.get(name) != problem:
            self._problems[name] = problem
            log.warning(what, kind=self._kind, name=name, error=str(error))


def _patience(error: KubelendError) -> timedelta:
    """The pause that the error asks for."""
    request = error.retry_after if isinstance(error, LimitExceeded | Unavailable) else 0.0
    return timedelta(seconds=request)
