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


class ReconcileQueue:
    """Reconciles objects of one kind by name."""

    def __init__(self, kind: str, reconcile: Callable[[str], Awaitable[None]]) -> None:
        self._kind = kind
        self._reconcile = reconcile
        self._queue: Workqueue[str] = Workqueue()
        self._logged_errors: dict[str, str] = {}

    def add(self, name: str) -> None:
        self._queue.add(name)

    def add_after(self, name: str, delay: timedelta) -> None:
        self._queue.add_after(name, delay)

    async def run(self) -> None:
        """Runs until cancelled."""
        await self._queue.run(self._attempt)

    async def _attempt(self, name: str) -> None:
        try:
            await self._reconcile(name)
        except KubelendError as error:
            self._queue.retry(name, _retry_after(error))
            self._log_once("Reconcile failed, will retry", name, error.code, error)
        except msgspec.MsgspecError as error:  # a retry would not help until the object is changed
            self._queue.forget(name)
            self._log_once("Skipping invalid object", name, str(error), error)
        else:
            self._queue.forget(name)
            if self._logged_errors.pop(name, None) is not None:
                log.info("Reconcile recovered", kind=self._kind, name=name)

    def _log_once(self, message: str, name: str, cause: str, error: Exception) -> None:
        if self._logged_errors.get(name) != cause:
            self._logged_errors[name] = cause
            log.warning(message, kind=self._kind, name=name, error=str(error))


def _retry_after(error: KubelendError) -> timedelta:
    """The pause that the error asks for."""
    request = error.retry_after if isinstance(error, LimitExceeded | Unavailable) else 0.0
    return timedelta(seconds=request)
