"""Local objects in memory, and `WatchableStore`: objects by kind and key with their watchers, which other
stores use as well.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Generic, cast

from kubelend.agent.ports import Deleted, Listed
from kubelend.sources import object_semantics
from kubelend.wire.objects import Kind, Object


class WatchQueue(Generic[Kind]):
    """Pending events of one watcher: only the latest of each object, so a slow watcher costs no
    memory.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Kind | Deleted] = {}
        self._has_events = asyncio.Event()

    def put(self, uid: str, change: Kind | Deleted) -> None:
        self._pending[uid] = change
        self._has_events.set()

    def pop(self) -> Kind | Deleted | None:
        """The oldest pending event; None if there is none."""
        if not self._pending:
            self._has_events.clear()
            return None
        return self._pending.pop(next(iter(self._pending)))

    async def wait(self, seconds: float | None = None) -> None:
        """Until there is an event, or for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_events.wait()
        except TimeoutError:
            return


class WatchableStore:
    """The current state of all objects."""

    def __init__(self) -> None:
        self._objects: defaultdict[type[Object], dict[str, Object]] = defaultdict(dict)
        self._watches: defaultdict[type[Object], list[WatchQueue[Object]]] = defaultdict(list)

    def list(self, kind: type[Kind]) -> list[Kind]:
        return [cast(Kind, found) for _, found in sorted(self._objects[kind].items())]

    def find(self, kind: type[Kind], key: str) -> Kind | None:
        return cast(Kind | None, self._objects[kind].get(key))

    def put(self, found: Object) -> None:
        """Add or replace an object."""
        self._objects[type(found)][found.key] = found
        self._notify(found, found)

    def delete(self, last: Object) -> None:
        """Delete the object; `last` is its last state."""
        self._objects[type(last)].pop(last.key, None)
        self._notify(last, Deleted(last))

    @contextmanager
    def subscribe(self, kind: type[Kind]) -> Iterator[WatchQueue[Kind]]:
        """Receive the changes from now on."""
        subscription: WatchQueue[Kind] = WatchQueue()
        subscriptions = self._watches[kind]
        subscriptions.append(cast(WatchQueue[Object], subscription))
        try:
            yield subscription
        finally:
            subscriptions.remove(cast(WatchQueue[Object], subscription))

    def _notify(self, found: Object, change: Object | Deleted) -> None:
        for subscription in self._watches[type(found)]:
            subscription.put(found.metadata.uid, change)


class MemoryObjects:
    """`agent.ports.LocalObjects` that are lost with the process."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._store = WatchableStore()

    async def list(self, kind: type[Kind]) -> list[Kind]:
        return self._store.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        object_semantics.parse_object_key(key)
        return self._store.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        object_semantics.parse_object_key(wanted.key)
        stored = self._store.find(type(wanted), wanted.key)
        return self._save(stored, object_semantics.apply_to_stored(stored, wanted, self._clock()))

    async def set_status(self, wanted: Kind) -> Kind | None:
        object_semantics.parse_object_key(wanted.key)
        stored = self._store.find(type(wanted), wanted.key)
        changed = object_semantics.apply_status_to_stored(stored, wanted)
        return None if changed is None else self._save(stored, changed)

    async def delete(self, kind: type[Kind], key: str) -> None:
        object_semantics.parse_object_key(key)
        stored = self._store.find(kind, key)
        if stored is not None:
            self._save(stored, object_semantics.mark_deleted(stored, self._clock()))

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        with self._store.subscribe(kind) as news:
            yield Listed(self._store.list(kind))
            while True:
                while (change := news.pop()) is not None:
                    yield change
                await self._wait_for_event(kind, news)

    async def _wait_for_event(self, kind: type[Kind], queue: WatchQueue[Kind]) -> None:  # noqa: ARG002
        await queue.wait()

    def _save(self, stored: Object | None, wanted: Kind) -> Kind:
        if object_semantics.is_removable(wanted):
            self._store.delete(wanted)
        elif wanted is not stored:
            self._store.put(wanted)
        return wanted
