"""The objects of one kind as the watch tells of them, and those that have gone.

A look that finds nothing to do in here costs no call. What has gone is remembered until a look has drawn the
consequences: our finalizer can be taken off by anybody who may write the object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import structlog

from kubelend.kube.answers import UndecodableObject
from kubelend.kube.watching import Change, Deleted, Listed
from kubelend.wire.objects import Object

CachedKind = TypeVar("CachedKind", bound=Object)

log = structlog.get_logger("kubelend.controllers")


class Update(NamedTuple, Generic[CachedKind]):
    """An object that is otherwise than it was."""

    before: CachedKind
    after: CachedKind


class InformerCache(Generic[CachedKind]):
    """`look` is called with the names of what has changed, `turn` with what it was before and is now."""

    def __init__(
        self,
        enqueue: Callable[[str], None],
        on_update: Callable[[Update[CachedKind]], None] = lambda _: None,
    ) -> None:
        self.has_synced = False
        """Whether all objects have been seen once."""
        self._enqueue = enqueue
        self._on_update = on_update
        self._objects: dict[str, CachedKind] = {}
        self._tombstones: dict[str, list[CachedKind]] = {}
        self._undecodable: dict[str, UndecodableObject] = {}

    def find(self, name: str) -> CachedKind | None:
        return self._objects.get(name)

    def all(self) -> list[CachedKind]:
        return list(self._objects.values())

    def tombstones(self, name: str) -> list[CachedKind]:
        """Those of this name that have gone, as they were at last."""
        return list(self._tombstones.get(name, ()))

    def forget(self, gone: CachedKind) -> None:
        """All that follows from its end is done."""
        name = gone.metadata.name
        self._tombstones[name] = [one for one in self._tombstones.pop(name, ()) if one is not gone]
        if not self._tombstones[name]:
            del self._tombstones[name]

    def undecodable(self, name: str) -> UndecodableObject | None:
        """Why the object of this name cannot be read as it is now; None if it can, or is not there."""
        return self._undecodable.get(name)

    def enqueue_all(self) -> None:
        """The ledger was read anew, or this broker leads from now on."""
        for name in dict.fromkeys((*self._objects, *self._tombstones, *self._undecodable)):
            self._enqueue(name)

    def handle(self, change: Change[CachedKind]) -> None:
        match change:
            case Listed(objects, unreadable):
                self._on_list(objects, unreadable)
            case Deleted(found):
                self._on_delete(found)
            case UndecodableObject():
                self._on_undecodable(change)
            case found:
                self._on_upsert(found)

    def _on_list(self, objects: list[CachedKind], undecodable: Iterable[UndecodableObject]) -> None:
        present = {found.metadata.uid for found in objects}
        kept = present | {one.uid for one in undecodable}
        for known in list(self._objects.values()):
            if known.metadata.uid not in kept:
                self._on_delete(known)
        for name in self._undecodable.keys() - {one.name for one in undecodable}:
            del self._undecodable[name]
        for found in objects:
            self._on_upsert(found)
        for one in undecodable:
            self._on_undecodable(one)
        self.has_synced = True

    def _on_upsert(self, found: CachedKind) -> None:
        name = found.metadata.name
        before = self._objects.get(name)
        if before is not None and before.metadata.uid != found.metadata.uid:
            self._on_delete(before)
            before = None
        self._objects[name] = found
        self._undecodable.pop(name, None)
        if before is not None and before != found:
            self._on_update(Update(before, found))
        self._enqueue(name)

    def _on_delete(self, gone: CachedKind) -> None:
        name = gone.metadata.name
        known = self._objects.get(name)
        if known is not None and known.metadata.uid == gone.metadata.uid:
            del self._objects[name]
        self._tombstones.setdefault(name, []).append(gone)
        self._enqueue(name)

    def _on_undecodable(self, found: UndecodableObject) -> None:
        """Its end, too, may come in a form that cannot be read."""
        if found.is_deleted:
            self._undecodable.pop(found.name, None)
            known = self._objects.get(found.name)
            if known is not None and known.metadata.uid == found.uid:
                self._on_delete(known)
            else:  # nobody ever knew what it was, but a record of it may be there
                self._enqueue(found.name)
        elif self._undecodable.get(found.name) != found:  # told once, and not at every list
            self._undecodable[found.name] = found
            log.warning(
                "object cannot be read, and is left alone", object=found.name, why=found.error
            )
            self._enqueue(found.name)
