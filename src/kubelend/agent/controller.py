"""Tools of the agent's reconcilers: watches, the cache of watched objects, updates with retry on conflict.

A user edits a spec, the requester and the peering add finalizers, and both write the status of a
ReservationInstruction: no writer may undo a concurrent change of another. `LocalObjects` reject writes
that are based on an old version.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from kubelend.agent.ports import Clock, Deleted, Listed, LocalObjects
from kubelend.core.errors import Conflict, KubelendError, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.wire.events import EmitEvent, EventRecord
from kubelend.wire.objects import Kind, ObjectCache, with_status

CONFLICT_ATTEMPTS: Final = 5

Result = TypeVar("Result")


async def retry_on_conflict(
    attempt: Callable[[], Awaitable[Result]], first: Callable[[], Awaitable[Result]] | None = None
) -> Result:
    """Call `attempt`, which reads and writes an object, until no other client writes in between.

    `first` is the first attempt: a write of a version that was read before, which is rejected if it is not
    the current one.
    """
    for each in (first or attempt, *[attempt] * (CONFLICT_ATTEMPTS - 2)):
        with contextlib.suppress(Conflict):
            return await each()
    return await attempt()


async def apply_object(
    objects: LocalObjects,
    wanted: Kind,
    before_update: Callable[[Kind], Awaitable[object]] | None = None,
) -> Kind:
    """Create the object or update its spec. Metadata that others added is preserved.

    `before_update` is called with an object whose spec is about to change.
    """
    parts: Any = wanted

    async def attempt() -> Kind:
        found: Any = await objects.find(type(wanted), wanted.key)
        if found is not None and found.spec == parts.spec:
            current: Kind = found
            return current
        if found is not None and before_update is not None:
            await before_update(found)
            found = await objects.find(type(wanted), wanted.key)
        return await objects.apply(wanted if found is None else replace(found, spec=parts.spec))

    return await retry_on_conflict(attempt)


async def update_status(
    objects: LocalObjects,
    found: Kind,
    change: Callable[[Kind], msgspec.Struct],
    clock: Clock,
    on_written: Callable[[Kind, Kind], None] | None = None,
    *,
    is_current: bool = False,
) -> Kind | None:
    """Set the status that `change` returns for the current object, stamped with the time.

    Writes nothing if nothing changes. None if the object is gone or was recreated. `on_written` is called
    with the object before and after a write. `is_current`: `found` has just been read, and need not be read
    again to find that nothing changes.
    """

    async def write(known: Kind, status: msgspec.Struct) -> Kind | None:
        written = await objects.set_status(with_status(known, status, clock()))
        if written is not None and on_written is not None:
            on_written(known, written)
        return written

    async def attempt() -> Kind | None:
        newest = await _current_object(objects, found)
        if newest is None:
            return None
        status = change(newest)
        return await write(newest, status) if _is_changed(newest, status) else newest

    async def first() -> Kind | None:
        status = change(found)
        if _is_changed(found, status):
            return await write(found, status)
        return found if is_current else await attempt()

    return await retry_on_conflict(attempt, first if found.metadata.resource_version else None)


def _is_changed(found: Any, status: msgspec.Struct) -> bool:
    known: msgspec.Struct = found.status
    return replace(status, last_update_time=found.status.last_update_time) != known


def emit_all(
    emit: EmitEvent, derive: Callable[[Kind, Kind], Iterable[EventRecord]]
) -> Callable[[Kind, Kind], None]:
    """The `on_written` that emits the Events derived from a status update."""

    def on_written(before: Kind, after: Kind) -> None:
        for event in derive(before, after):
            emit(event)

    return on_written


async def add_finalizer(objects: LocalObjects, found: Kind, finalizer: str) -> Kind | None:
    """None if the object is gone or was recreated. One that is being deleted gets no new finalizer."""
    return await _update_finalizers(
        objects, found, lambda known: known if finalizer in known else (*known, finalizer)
    )


async def remove_finalizer(objects: LocalObjects, found: Kind, finalizer: str) -> Kind | None:
    """None if the object is gone or was recreated."""
    return await _update_finalizers(
        objects, found, lambda known: tuple(name for name in known if name != finalizer)
    )


async def _update_finalizers(
    objects: LocalObjects, found: Kind, change: Callable[[tuple[str, ...]], tuple[str, ...]]
) -> Kind | None:
    async def write(known: Kind) -> Kind:
        metadata = replace(known.metadata, finalizers=change(known.metadata.finalizers))
        return await objects.apply(replace(known, metadata=metadata))

    async def attempt() -> Kind | None:
        newest = await _current_object(objects, found)
        return newest if newest is None or not is_changed(newest) else await write(newest)

    def is_changed(known: Kind) -> bool:
        return change(known.metadata.finalizers) != known.metadata.finalizers

    async def first() -> Kind | None:
        return await write(found) if is_changed(found) else await attempt()

    return await retry_on_conflict(attempt, first if found.metadata.resource_version else None)


async def _current_object(objects: LocalObjects, found: Kind) -> Kind | None:
    newest = await objects.find(type(found), found.key)
    is_same = newest is not None and newest.metadata.uid == found.metadata.uid
    return newest if is_same else None


class LocalCache(ObjectCache[Kind]):
    """Cache of watched local objects.

    The agent's own status writes do not trigger a reconcile: they would cut every retry pause short.
    """

    def __init__(self, kind: type[Kind], enqueue: Callable[[str], None]) -> None:
        super().__init__(enqueue)
        self._kind = kind

    def handle_event(self, event: Kind | Deleted | Listed) -> None:
        match event:
            case Listed(objects):
                self.on_list([found for found in objects if isinstance(found, self._kind)])
            case Deleted(last_state):
                if isinstance(last_state, self._kind):
                    self.on_delete(last_state)
            case found:
                self.on_update(found)

    def triggers(self, before: Kind, after: Kind) -> bool:
        return self.trigger_fields(before) != self.trigger_fields(after)

    def trigger_fields(self, found: Kind) -> tuple[object, ...]:
        """The fields whose change triggers a reconcile."""
        return found.metadata.generation, found.metadata.deletion_timestamp


_WATCH_BACKOFF: Final = Backoff(retries=sys.maxsize, first=timedelta(milliseconds=500))


async def watch_objects(
    objects: LocalObjects,
    kind: type[Kind],
    on_event: Callable[[Kind | Deleted | Listed], None],
    on_error: Callable[[str], None],
    chance: Callable[[], float] = random.random,
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
