"""Objects in memory whose reads and writes fail, are slow or meet those of another client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import datetime

from msgspec.structs import replace

import virtual_time
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.objects import Kind, Object


class FailingObjects(MemoryObjects):
    """Works, unless an attribute is set."""

    error: Exception | None = None
    """Of every write."""
    list_error: Exception | None = None
    seconds = 0.0
    """Duration of `apply`."""
    conflicts = 0
    """How often another client labels the object just before its status is set."""
    writes = 0
    """How often `apply` was called."""

    def __init__(self, clock: Callable[[], datetime] = virtual_time.now) -> None:
        super().__init__(clock)
        self.reads = Counter[type[Object]]()
        """How often an object of each kind was read."""

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        self.reads[kind] += 1
        return await super().find(kind, key)

    async def list(self, kind: type[Kind]) -> list[Kind]:
        if self.list_error is not None:
            raise self.list_error
        return await super().list(kind)

    async def apply(self, wanted: Kind) -> Kind:
        self.writes += 1
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return await super().apply(wanted)

    async def set_status(self, wanted: Kind) -> Kind | None:
        if self.error is not None:
            raise self.error
        found = await super().find(type(wanted), wanted.key)
        if self.conflicts and found is not None:
            self.conflicts -= 1
            labels = {"team": str(self.conflicts)}
            await super().apply(replace(found, metadata=replace(found.metadata, labels=labels)))
        return await super().set_status(wanted)
