"""Records the versions of objects of one kind in a cluster, with the time each was observed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kubelend.core.errors import Unavailable
from kubelend.kube import resources, watching
from kubelend.kube.answers import UndecodableObject
from kubelend.kube.client import Client
from kubelend.kube.watching import Deleted, Listed
from kubelend.lab import rights
from kubelend.wire.objects import Kind, Object

ObjectT = TypeVar("ObjectT", bound=Object)


class Observation(NamedTuple, Generic[ObjectT]):
    """One observed version of an object."""

    found: ObjectT
    at: float
    """Time by `time.perf_counter`."""
    is_deleted: bool = False


class ObjectTimeline(Generic[Kind]):
    """Watches one kind and keeps all versions, so that none is missed while waiting for another object."""

    def __init__(self, client: Client, cluster: str, kind: type[Kind], patience: float) -> None:
        """`patience` is the timeout of `first` in seconds."""
        self._timeout = patience
        self._client = client
        self._cluster = cluster
        self._kind = kind
        self._observations: list[Observation[Kind]] = []
        self._changed = asyncio.Condition()
        self.is_watching = asyncio.Event()
        """Set when the watch has been established."""

    async def run(self) -> None:
        """Watches until cancelled."""
        resource = resources.resource_for(self._kind)
        async for change in watching.list_and_watch(
            self._client, resource, rights.OBJECT_NAMESPACE
        ):
            async with self._changed:
                self._on_change(change)
                self._changed.notify_all()
            self.is_watching.set()

    async def wait_for(
        self, name: str, wanted: Callable[[Observation[Kind]], bool], what: str
    ) -> Observation[Kind]:
        """Waits for the first version that fulfils `wanted`; `what` describes the timeout error."""

        def find() -> Observation[Kind] | None:
            named = (one for one in self._observations if one.found.metadata.name == name)
            return next(filter(wanted, named), None)

        try:
            async with asyncio.timeout(self._timeout), self._changed:
                await self._changed.wait_for(lambda: find() is not None)
        except TimeoutError:
            raise Unavailable(
                f"{self._kind.kind} {name} of {self._cluster} {what} within {self._timeout:g} s"
            ) from None
        found = find()
        assert found is not None  # noqa: S101 - for the type checker
        return found

    def latest(self, name: str) -> Kind | None:
        """Returns the latest observed version."""
        return next(
            (one.found for one in reversed(self._observations) if one.found.metadata.name == name),
            None,
        )

    def _on_change(self, change: watching.Change[Kind]) -> None:
        now = time.perf_counter()
        if isinstance(change, Listed):
            self._observations += [Observation(found, now) for found in change.objects]
        elif isinstance(change, Deleted):
            self._observations.append(Observation(change.found, now, is_deleted=True))
        elif not isinstance(change, UndecodableObject):
            self._observations.append(Observation(change, now))
