"""Updates of local objects with retry on conflict: read, change, write if unchanged since, else again.

A user edits a spec, the requester and the peering add finalizers, and both write the status of a
ReservationInstruction: no writer may undo a concurrent change of another. `LocalObjects` reject writes
that are based on an old version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kubelend.agent.ports import Clock, LocalObjects
from kubelend.core.errors import Conflict
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
    """Create the object or update its spec. Metadata that others added is kept."""
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
    said = replace(status, last_update_time=found.status.last_update_time)
    return bool(said == found.status)


def _with_finalizers(found: Kind, finalizers: tuple[str, ...]) -> Kind:
    return replace(found, metadata=replace(found.metadata, finalizers=finalizers))
