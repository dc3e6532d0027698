"""Informer: lists and watches the objects of a kind, and caches them.

The agent's source, the store and the controllers watch their objects with it. Ended watches, disconnects
and expired resource versions are handled here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from typing import Final, Generic, NamedTuple, TypeAlias

from kubelend.core.errors import Gone, KubelendError, LimitExceeded, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.kube.answers import UndecodableObject, WatchEvent
from kubelend.kube.client import Client
from kubelend.kube.resources import Kind, Resource

WatchReport = Callable[[str], None]
"""Called with an error when the watch fails, and with an empty string when it works again."""

UNLIMITED_RETRIES: Final = 1 << 62
WATCH_BACKOFF: Final = Backoff(retries=UNLIMITED_RETRIES, first=timedelta(milliseconds=500))
MIN_WATCH_SECONDS: Final = 1.0
"""Seconds. A watch that ends sooner without an event counts as failed."""


class Listed(NamedTuple, Generic[Kind]):
    """The complete list of objects, which replaces everything known before."""

    objects: list[Kind]
    undecodable: list[UndecodableObject]


class Deleted(NamedTuple, Generic[Kind]):
    """A deleted object; `found` is its last known state."""

    found: Kind


Change: TypeAlias = "Listed[Kind] | Deleted[Kind] | UndecodableObject | Kind"
"""A plain object was added or modified."""


async def list_and_watch(
    client: Client,
    resource: Resource[Kind],
    namespace: str = "",
    *,
    labels: str = "",
    fields: str = "",
    report: WatchReport = lambda _: None,
    backoff: Backoff = WATCH_BACKOFF,
) -> AsyncGenerator[Change[Kind], None]:
    """List and watch a resource until cancelled. Yields `Listed` first and after each relist, otherwise
    single changes.

    All errors are retried with backoff, because all can be fixed from outside: permissions granted, CRDs
    applied, servers started. `report` is called when the watch fails or recovers.
    """
    watcher = _ListWatcher(client, resource, namespace, labels, fields, report)
    delays = backoff.delays()
    while True:
        failure: KubelendError | None = None
        try:
            async with contextlib.aclosing(watcher.run_once()) as changes:
                async for change in changes:
                    yield change
        except Gone:
            watcher.since = ""
        except KubelendError as error:
            failure = error
        if watcher.succeeded:
            delays = backoff.delays()
        elif failure is None:
            failure = Unavailable(f"watches of {resource} end immediately")
        if failure is not None:
            watcher.report_error(str(failure))
            await asyncio.sleep(max(next(delays), _retry_after(failure)))


class _ListWatcher(Generic[Kind]):
    """State of the list-and-watch loop across watches."""

    def __init__(
        self,
        client: Client,
        resource: Resource[Kind],
        namespace: str,
        labels: str,
        fields: str,
        report: WatchReport,
    ) -> None:
        self._client = client
        self._resource = resource
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._report = report
        self._reported = ""
        self.since = ""
        """Resource version of the last event; empty if a list is needed."""
        self.succeeded = False
        """Whether the last watch received an event or lasted for a while."""

    async def run_once(self) -> AsyncGenerator[Change[Kind], None]:
        """Run one watch, after a list if needed."""
        self.succeeded = False
        if not self.since:
            listing = await self._client.list(
                self._resource, self._namespace, labels=self._labels, fields=self._fields
            )
            self.since = listing.resource_version
            yield Listed(listing.objects, listing.undecodable)
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
                    if (change := self._to_change(event)) is not None:
                        yield change
        finally:
            self.succeeded |= asyncio.get_running_loop().time() - began > MIN_WATCH_SECONDS

    def report_error(self, error: str) -> None:
        """Report an error if it has changed."""
        if error != self._reported:
            self._reported = error
            self._report(error)

    def _to_change(self, event: WatchEvent[Kind]) -> Change[Kind] | None:
        self.report_error("")
        self.succeeded |= event.resource_version != self.since
        self.since = event.resource_version
        if event.found is None:
            return event.undecodable
        return Deleted(event.found) if event.type == "DELETED" else event.found


def _retry_after(error: KubelendError) -> float:
    """Retry-After of the server in seconds."""
    return error.retry_after if isinstance(error, LimitExceeded | Unavailable) else 0.0
