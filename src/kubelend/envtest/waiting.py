"""Waits for processes and objects, with one factor for all time limits of development tools and tests.

`KUBELEND_PATIENCE=3` gives a slow machine three times as long. A wait ends as soon as its condition holds.
`ObjectTimeline` records every version of objects that a watch shows, with its time: no state is missed while
waiting for another object.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kubelend.core.errors import Unavailable
from kubelend.kube import informer
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from kubelend.kube.resources import Kind, Object, Resource

FACTOR: Final = float(os.environ.get("KUBELEND_PATIENCE", "") or 1)

_POLL = 0.02

Found = TypeVar("Found")


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float) -> None:
    """Blocks until the condition holds. `otherwise` states in the error what did not happen."""
    deadline = time.monotonic() + seconds * FACTOR
    while not condition():
        if time.monotonic() > deadline:
            raise _too_late(otherwise, seconds)
        time.sleep(_POLL)


async def until(
    find: Callable[[], Awaitable[Found | None]],
    otherwise: str,
    seconds: float,
    *,
    poll: float = _POLL,
) -> Found:
    """Waits until `find` returns something that is true, and returns it."""
    deadline = time.monotonic() + seconds * FACTOR
    while not (found := await find()):
        if time.monotonic() > deadline:
            raise _too_late(otherwise, seconds)
        await asyncio.sleep(poll)
    return found


async def within(seconds: float, work: Awaitable[Found], otherwise: str) -> Found:
    """Awaits `work` for at most this long."""
    try:
        return await asyncio.wait_for(work, seconds * FACTOR)
    except TimeoutError:
        raise _too_late(otherwise, seconds) from None


def _too_late(otherwise: str, seconds: float) -> Unavailable:
    return Unavailable(f"{otherwise} within {seconds * FACTOR:g} s")


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
        return await within(
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
        await within(_WATCH_TIMEOUT, established, "watches were not established")
        yield
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
