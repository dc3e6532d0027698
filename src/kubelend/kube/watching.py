"""All objects of a kind, kept up to date for ever: list, watch, and again from where it was.

The agent's source, the store and the controllers follow their objects with it. What the API server ends,
cuts off or has forgotten is waited out here; a follower hears only of objects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from typing import Final, Generic, NamedTuple, TypeAlias

from kubelend.core.errors import Gone, KubelendError, LimitExceeded, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.kube.answers import Seen, Unreadable
from kubelend.kube.client import Client
from kubelend.kube.resources import Kind, Resource

Report = Callable[[str], None]
"""Is told why objects cannot be seen now, and nothing once they can."""

ENDLESS: Final = 1 << 62
BACKOFF: Final = Backoff(retries=ENDLESS, first=timedelta(milliseconds=500))
SHORT: Final = 1.0
"""Seconds. A watch that ends sooner, and without a word, did not go well, whatever the server says."""


class Listed(NamedTuple, Generic[Kind]):
    """All that is there: what the follower knew before is forgotten."""

    objects: list[Kind]
    unreadable: list[Unreadable]


class Deleted(NamedTuple, Generic[Kind]):
    """It is gone; `found` is what it was at last."""

    found: Kind


Change: TypeAlias = "Listed[Kind] | Deleted[Kind] | Unreadable | Kind"
"""An object stands for itself: it is new, or otherwise than before."""


async def follow(
    client: Client,
    resource: Resource[Kind],
    namespace: str = "",
    *,
    labels: str = "",
    fields: str = "",
    report: Report = lambda _: None,
    backoff: Backoff = BACKOFF,
) -> AsyncGenerator[Change[Kind], None]:
    """First `Listed`, then what changes; after a gap in what could be seen `Listed` again. Does not end.

    Every error is waited out, for all of them can be mended from outside: rights are granted, kinds
    defined, servers started. `report` is told of each change between seeing and not seeing.
    """
    follower = _Follower(client, resource, namespace, labels, fields, report)
    delays = backoff.delays()
    while True:
        problem: KubelendError | None = None
        try:
            async with contextlib.aclosing(follower.round()) as changes:
                async for change in changes:
                    yield change
        except Gone:
            follower.since = ""
        except KubelendError as error:
            problem = error
        if follower.went_well:
            delays = backoff.delays()
        elif problem is None:
            problem = Unavailable(f"no watch of {resource} lasts")
        if problem is not None:
            follower.tell(str(problem))
            await asyncio.sleep(max(next(delays), _asked(problem)))


class _Follower(Generic[Kind]):
    """How far it has come, from one watch to the next."""

    def __init__(
        self,
        client: Client,
        resource: Resource[Kind],
        namespace: str,
        labels: str,
        fields: str,
        report: Report,
    ) -> None:
        self._client = client
        self._resource = resource
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._report = report
        self._told = ""
        self.since = ""
        """The version up to which everything has been seen; empty if nothing has."""
        self.went_well = False
        """Whether the last round saw something, or at least held for a while."""

    async def round(self) -> AsyncGenerator[Change[Kind], None]:
        """One watch, after a list if there is nothing to go on from."""
        self.went_well = False
        if not self.since:
            listing = await self._client.list(
                self._resource, self._namespace, labels=self._labels, fields=self._fields
            )
            self.since = listing.resource_version
            yield Listed(listing.objects, listing.unreadable)
        watch = self._client.watch(
            self._resource,
            self._namespace,
            since=self.since,
            labels=self._labels,
            fields=self._fields,
        )
        began = asyncio.get_running_loop().time()
        try:
            async with contextlib.aclosing(watch) as events:
                async for event in events:
                    if (change := self._taken(event)) is not None:
                        yield change
        finally:
            self.went_well |= asyncio.get_running_loop().time() - began > SHORT

    def tell(self, problem: str) -> None:
        """Changes only."""
        if problem != self._told:
            self._told = problem
            self._report(problem)

    def _taken(self, event: Seen[Kind]) -> Change[Kind] | None:
        self.tell("")
        self.went_well |= event.resource_version != self.since
        self.since = event.resource_version
        if event.found is None:
            return event.unreadable
        return Deleted(event.found) if event.type == "DELETED" else event.found


def _asked(problem: KubelendError) -> float:
    """For how long the server wants to be left alone."""
    return problem.retry_after if isinstance(problem, LimitExceeded | Unavailable) else 0.0
