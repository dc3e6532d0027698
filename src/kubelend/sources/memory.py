"""Local objects in memory: for tests, and for an agent without persistent state.

`WatchableStore` is the part of every store that lives in the event loop: objects by kind and key, and
their watchers. `FileObjects` uses it too, so that lists and watches agree whatever happens on the disk
meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from datetime import datetime

from kubelend.agent.ports import Deleted, Listed
from kubelend.sources import names, revisions
from kubelend.sources.shelves import WatchableStore
from kubelend.wire.objects import Kind, Object


class MemoryObjects:
    """`agent.ports.LocalObjects` that are lost with the process."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._store = WatchableStore()

    async def list(self, kind: type[Kind]) -> list[Kind]:
        return self._store.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        names.parse_object_key(key)
        return self._store.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        names.parse_object_key(wanted.key)
        kept = self._store.find(type(wanted), wanted.key)
        return self._save(kept, revisions.apply_to_stored(kept, wanted, self._clock()))

    async def set_status(self, wanted: Kind) -> Kind | None:
        names.parse_object_key(wanted.key)
        kept = self._store.find(type(wanted), wanted.key)
        changed = revisions.apply_status_to_stored(kept, wanted)
        return None if changed is None else self._save(kept, changed)

    async def delete(self, kind: type[Kind], key: str) -> None:
        names.parse_object_key(key)
        kept = self._store.find(kind, key)
        if kept is not None:
            self._save(kept, revisions.mark_deleted(kept, self._clock()))

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        with self._store.subscribe(kind) as news:
            yield Listed(self._store.list(kind))
            while True:
                while (change := news.pop()) is not None:
                    yield change
                await news.wait()

    def _save(self, stored: Object | None, wanted: Kind) -> Kind:
        if revisions.is_removable(wanted):
            self._store.delete(wanted)
        elif wanted is not stored:
            self._store.put(wanted)
        return wanted
