"""A retry queue for long-running work whose owner reports the failures. One key that hangs does not
block others.

`agent.peering` has one queue to connect and one to disconnect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from datetime import timedelta
from typing import Generic, TypeVar

from kubelend.core.errors import KubelendError
from kubelend.kits.workqueue import Workqueue

Key = TypeVar("Key", bound=Hashable)


class RetryQueue(Generic[Key]):
    """Reconciles keys that were added, and retries failures with backoff."""

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[None]],
        on_failure: Callable[[Key, KubelendError], Awaitable[None]],
    ) -> None:
        """`on_failure` is called with each failure. Exceptions other than `KubelendError` end `run`."""
        self._reconcile = reconcile
        self._on_failure = on_failure
        self._queue: Workqueue[Key] = Workqueue()

    def add(self, key: Key) -> None:
        self._queue.add(key)

    def add_after(self, key: Key, delay: timedelta) -> None:
        self._queue.add_after(key, delay)

    def retry(self, key: Key) -> None:
        """Retry with a backoff that grows until `forget` is called."""
        self._queue.retry(key)

    def retry_now(self) -> None:
        """Retry failed keys now."""
        self._queue.retry_now()

    def forget(self, key: Key) -> None:
        """Reset the backoff."""
        self._queue.forget(key)

    async def run(self) -> None:
        """Runs until cancelled."""
        await self._queue.run(self._reconcile_once)

    async def _reconcile_once(self, key: Key) -> None:
        try:
            await self._reconcile(key)
        except KubelendError as error:
            self.retry(key)
            await self._on_failure(key, error)
