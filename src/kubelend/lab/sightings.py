"""Records the versions of objects of one kind in a cluster, with the time each was observed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kubelend.core.errors import Unavailable
from kubelend.kube import resources, watching
from kubelend.kube.answers import Unreadable
from kubelend.kube.client import Client
from kubelend.kube.watching import Deleted, Listed
from kubelend.lab import rights
from kubelend.wire.objects import Kind, Object

Own = TypeVar("Own", bound=Object)


class Sighting(NamedTuple, Generic[Own]):
    """One observed version of an object."""

    found: Own
    at: float
    """Time by `time.perf_counter`."""
    is_gone: bool = False


class Sightings(Generic[Kind]):
    """Watches one kind and keeps all versions, so that none is missed while waiting for another object."""

    def __init__(self, client: Client, cluster: str, kind: type[Kind], patience: float) -> None:
        """`patience` is the timeout of `first` in seconds."""
        self._patience = patience
        self._client = client
        self._cluster = cluster
        self._kind = kind
        self._seen: list[Sighting[Kind]] = []
        self._more = asyncio.Condition()
        self.begun = asyncio.Event()
        """Set when the watch has been established."""

    async def run(self) -> None:
        """Watches until cancelled."""
        resource = resources.of(self._kind)
        async for change in watching.follow(self._client, resource, rights.OBJECTS):
            async with self._more:
                self._take(change)
                self._more.notify_all()
            self.begun.set()

    async def first(
        self, name: str, wanted: Callable[[Sighting[Kind]], bool], what: str
    ) -> Sighting[Kind]:
        """Waits for the first version that fulfils `wanted`; `what` describes the timeout error."""

        def find() -> Sighting[Kind] | None:
            named = (one for one in self._seen if one.found.metadata.name == name)
            return next(filter(wanted, named), None)

        try:
            async with asyncio.timeout(self._patience), self._more:
                await self._more.wait_for(lambda: find() is not None)
        except TimeoutError:
            raise Unavailable(
                f"{self._kind.kind} {name} of {self._cluster} {what} within {self._patience:g} s"
            ) from None
        found = find()
        assert found is not None  # noqa: S101 - for the type checker
        return found

    def last(self, name: str) -> Kind | None:
        """Returns the latest observed version."""
        return next(
            (one.found for one in reversed(self._seen) if one.found.metadata.name == name), None
        )

    def _take(self, change: watching.Change[Kind]) -> None:
        now = time.perf_counter()
        if isinstance(change, Listed):
            self._seen += [Sighting(found, now) for found in change.objects]
        elif isinstance(change, Deleted):
            self._seen.append(Sighting(change.found, now, is_gone=True))
        elif not isinstance(change, Unreadable):
            self._seen.append(Sighting(change, now))
