"""What is to be seen of a kind of object in a cluster, from now on, with the moment of each sighting."""

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
    """One version of an object."""

    found: Own
    at: float
    """By the clock of `time.perf_counter`."""
    is_gone: bool = False


class Sightings(Generic[Kind]):
    """Of one kind; kept, so that what happened while one waited for something else is not missed."""

    def __init__(self, client: Client, cluster: str, kind: type[Kind], patience: float) -> None:
        """`patience`: the seconds after which what has not been seen will not be."""
        self._patience = patience
        self._client = client
        self._cluster = cluster
        self._kind = kind
        self._seen: list[Sighting[Kind]] = []
        self._more = asyncio.Condition()
        self.begun = asyncio.Event()
        """From here on nothing is missed."""

    async def run(self) -> None:
        """For ever."""
        resource = resources.of(self._kind)
        async for change in watching.follow(self._client, resource, rights.OBJECTS):
            async with self._more:
                self._take(change)
                self._more.notify_all()
            self.begun.set()

    async def first(
        self, name: str, wanted: Callable[[Sighting[Kind]], bool], what: str
    ) -> Sighting[Kind]:
        """The first one of an object that is as wanted; `what` says what that means, if none comes."""

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
        assert found is not None  # noqa: S101 - it was waited for; for the type checker
        return found

    def last(self, name: str) -> Kind | None:
        """As it was seen last."""
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
