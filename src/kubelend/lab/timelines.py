"""Records every observed version of objects with its time, from watches.

So no state is missed while waiting for another object, and a time is that of the event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from kubelend.envtest import waiting
from kubelend.kube import informer
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from kubelend.kube.resources import Kind, Object, Resource

_WATCH_TIMEOUT = 20.0

ObjectT = TypeVar("ObjectT", bound=Object)


class Observation(NamedTuple, Generic[ObjectT]):
    """One observed version of an object."""

    found: ObjectT
    at: float
    """Time by `time.perf_counter`."""
    is_deleted: bool = False


class ObjectTimeline(Generic[Kind]):
    """Watches one kind and records all versions, so that none is missed while waiting for another object."""

    def __init__(
        self,
        client: Client,
        cluster: str,
        resource: Resource[Kind],
        timeout: float,
        namespace: str = "",
    ) -> None:
        """`timeout` is that of `wait_for`, in seconds. Without a namespace, all are watched."""
        self.cluster = cluster
        self.resource = resource
        self._namespace = namespace
        self.is_watching = asyncio.Event()
        """Set when the watch has been established."""
        self._client = client
        self._timeout = timeout
        self._observations: list[Observation[Kind]] = []
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Watches until cancelled."""
        changes = informer.list_and_watch(self._client, self.resource, self._namespace)
        async for change in changes:
            async with self._changed:
                self._on_change(change)
                self._changed.notify_all()
            self.is_watching.set()

    async def wait_for(
        self, name: str, wanted: Callable[[Observation[Kind]], bool], otherwise: str
    ) -> Observation[Kind]:
        """Waits for the first version that fulfils `wanted`; `otherwise` describes the timeout error."""
        return await waiting.within(
            self._timeout,
            self._first(name, wanted),
            f"{self.resource.kind} {name} of {self.cluster} {otherwise}",
        )

    async def _first(
        self, name: str, wanted: Callable[[Observation[Kind]], bool]
    ) -> Observation[Kind]:
        async with self._changed:
            while True:
                for one in self._observations:
                    if one.found.metadata.name == name and wanted(one):
                        return one
                await self._changed.wait()

    def latest(self, name: str) -> Kind | None:
        """Returns the latest observed version."""
        return next(
            (one.found for one in reversed(self._observations) if one.found.metadata.name == name),
            None,
        )

    def _on_change(self, change: informer.Change[Kind]) -> None:
        now = time.perf_counter()
        if isinstance(change, Listed):
            self._observations += [Observation(found, now) for found in change.objects]
        elif isinstance(change, Deleted):
            self._observations.append(Observation(change.found, now, is_deleted=True))
        elif not isinstance(change, UndecodableObject):
            self._observations.append(Observation(change, now))


@asynccontextmanager
async def watching(*timelines: ObjectTimeline[Any]) -> AsyncIterator[None]:
    """Runs the watches; waits first until all are established."""
    watches = [asyncio.create_task(one.run()) for one in timelines]
    try:
        established = asyncio.gather(*(one.is_watching.wait() for one in timelines))
        await waiting.within(_WATCH_TIMEOUT, established, "watches were not established")
        yield
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
