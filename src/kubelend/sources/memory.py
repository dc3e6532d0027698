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
from kubelend.sources.shelves import Shelf
from kubelend.wire.objects import Kind, Object


class MemoryObjects:
    """`agent.ports.LocalObjects` that are lost with the process."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._shelf = Shelf()

    async def list(self, kind: type[Kind]) -> list[Kind]:
        return self._shelf.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        names.parse(key)
        return self._shelf.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        names.parse(wanted.key)
        kept = self._shelf.find(type(wanted), wanted.key)
        return self._keep(kept, revisions.apply(kept, wanted, self._clock()))

    async def set_status(self, wanted: Kind) -> Kind | None:
        names.parse(wanted.key)
        kept = self._shelf.find(type(wanted), wanted.key)
        changed = revisions.set_status(kept, wanted)
        return None if changed is None else self._keep(kept, changed)

    async def delete(self, kind: type[Kind], key: str) -> None:
        names.parse(key)
        kept = self._shelf.find(kind, key)
        if kept is not None:
            self._keep(kept, revisions.delete(kept, self._clock()))

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        with self._shelf.subscribed(kind) as news:
            yield Listed(self._shelf.list(kind))
            while True:
                while (change := news.take()) is not None:
                    yield change
                await news.wait()

    def _keep(self, kept: Object | None, wanted: Kind) -> Kind:
        if revisions.is_over(wanted):
            self._shelf.drop(wanted)
        elif wanted is not kept:
            self._shelf.put(wanted)
        return wanted
