"""Tools of the agent's reconcilers: reconcile queue, watches, and object updates with retry on conflict.

A user edits a spec, the requester and the peering add finalizers, and both write the status of a
ReservationInstruction: no writer may undo a concurrent change of another. `LocalObjects` reject writes
that are based on an old version.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Hashable
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.agent import resource_requests
from kubelend.agent.ports import Clock, Deleted, Listed, LocalObjects
from kubelend.core.errors import Conflict, KubelendError, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.kits.workqueue import Workqueue
from kubelend.wire.objects import Kind, with_status

CONFLICT_ATTEMPTS: Final = 5


async def update_object(
    objects: LocalObjects,
    found: Kind,
    change: Callable[[Kind], Kind],
    attempts: int = CONFLICT_ATTEMPTS,
) -> Kind | None:
    """Apply `change` to the current object; None if it is gone or was recreated."""
    newest = await _current_object(objects, found)
    if newest is None:
        return None
    try:
        return await objects.apply(change(newest))
    except Conflict:
        if attempts <= 1:
            raise
    return await update_object(objects, found, change, attempts - 1)


async def apply_object(
    objects: LocalObjects, wanted: Kind, attempts: int = CONFLICT_ATTEMPTS
) -> Kind:
    """Create the object or update its spec. Metadata that others added is preserved."""
    found = await objects.find(type(wanted), wanted.key)
    parts: Any = wanted
    try:
        return await objects.apply(wanted if found is None else replace(found, spec=parts.spec))
    except Conflict:
        if attempts <= 1:
            raise
    return await apply_object(objects, wanted, attempts - 1)


async def update_status(
    objects: LocalObjects,
    found: Kind,
    change: Callable[[Kind], msgspec.Struct],
    clock: Clock,
    attempts: int = CONFLICT_ATTEMPTS,
) -> Kind | None:
    """Set the status that `change` returns for the current object, stamped with the time.

    Writes nothing if nothing changes. None if the object is gone or was recreated.
    """
    newest = await _current_object(objects, found)
    if newest is None:
        return None
    status = change(newest)
    if _is_status_equal(newest, status):
        return newest
    try:
        return await objects.set_status(with_status(newest, status, clock()))
    except Conflict:
        if attempts <= 1:
            raise
    return await update_status(objects, found, change, clock, attempts - 1)


async def add_finalizer(objects: LocalObjects, found: Kind, finalizer: str) -> Kind | None:
    """None as in `update_object`. An object that is being deleted gets no new finalizer."""

    def change(newest: Kind) -> Kind:
        known = newest.metadata.finalizers
        return _with_finalizers(newest, known if finalizer in known else (*known, finalizer))

    return await update_object(objects, found, change)


async def remove_finalizer(objects: LocalObjects, found: Kind, finalizer: str) -> Kind | None:
    """None as in `update_object`."""

    def change(newest: Kind) -> Kind:
        others = (name for name in newest.metadata.finalizers if name != finalizer)
        return _with_finalizers(newest, tuple(others))

    return await update_object(objects, found, change)


async def _current_object(objects: LocalObjects, found: Kind) -> Kind | None:
    newest = await objects.find(type(found), found.key)
    is_same = newest is not None and newest.metadata.uid == found.metadata.uid
    return newest if is_same else None


def _is_status_equal(found: Any, status: msgspec.Struct) -> bool:
    expected = replace(status, last_update_time=found.status.last_update_time)
    return bool(expected == found.status)


def _with_finalizers(found: Kind, finalizers: tuple[str, ...]) -> Kind:
    return replace(found, metadata=replace(found.metadata, finalizers=finalizers))


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
            delay = resource_requests.retry_after(error)
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
