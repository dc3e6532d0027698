"""Informer: lists and watches the objects of a kind, and caches them.

The agent's source, the store and the controllers watch their objects with it. Ended watches, disconnects
and expired resource versions are handled here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from datetime import timedelta
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import structlog

from kubelend.core.errors import Gone, KubelendError, LimitExceeded, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject, WatchEvent
from kubelend.kube.resources import Kind, Resource
from kubelend.wire.objects import Object

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


CachedKind = TypeVar("CachedKind", bound=Object)

log = structlog.get_logger("kubelend.controllers")


class Update(NamedTuple, Generic[CachedKind]):
    """An object that is otherwise than it was."""

    before: CachedKind
    after: CachedKind


class InformerCache(Generic[CachedKind]):
    """`look` is called with the names of what has changed, `turn` with what it was before and is now."""

    def __init__(
        self,
        enqueue: Callable[[str], None],
        on_update: Callable[[Update[CachedKind]], None] = lambda _: None,
    ) -> None:
        self.has_synced = False
        """Whether all objects have been seen once."""
        self._enqueue = enqueue
        self._on_update = on_update
        self._objects: dict[str, CachedKind] = {}
        self._tombstones: dict[str, list[CachedKind]] = {}
        self._undecodable: dict[str, UndecodableObject] = {}

    def find(self, name: str) -> CachedKind | None:
        return self._objects.get(name)

    def all(self) -> list[CachedKind]:
        return list(self._objects.values())

    def tombstones(self, name: str) -> list[CachedKind]:
        """Those of this name that have gone, as they were at last."""
        return list(self._tombstones.get(name, ()))

    def forget(self, gone: CachedKind) -> None:
        """All that follows from its end is done."""
        name = gone.metadata.name
        self._tombstones[name] = [one for one in self._tombstones.pop(name, ()) if one is not gone]
        if not self._tombstones[name]:
            del self._tombstones[name]

    def undecodable(self, name: str) -> UndecodableObject | None:
        """Why the object of this name cannot be read as it is now; None if it can, or is not there."""
        return self._undecodable.get(name)

    def enqueue_all(self) -> None:
        """The ledger was read anew, or this broker leads from now on."""
        for name in dict.fromkeys((*self._objects, *self._tombstones, *self._undecodable)):
            self._enqueue(name)

    def handle(self, change: Change[CachedKind]) -> None:
        match change:
            case Listed(objects, unreadable):
                self._on_list(objects, unreadable)
            case Deleted(found):
                self._on_delete(found)
            case UndecodableObject():
                self._on_undecodable(change)
            case found:
                self._on_upsert(found)

    def _on_list(self, objects: list[CachedKind], undecodable: Iterable[UndecodableObject]) -> None:
        present = {found.metadata.uid for found in objects}
        kept = present | {one.uid for one in undecodable}
        for known in list(self._objects.values()):
            if known.metadata.uid not in kept:
                self._on_delete(known)
        for name in self._undecodable.keys() - {one.name for one in undecodable}:
            del self._undecodable[name]
        for found in objects:
            self._on_upsert(found)
        for one in undecodable:
            self._on_undecodable(one)
        self.has_synced = True

    def _on_upsert(self, found: CachedKind) -> None:
        name = found.metadata.name
        before = self._objects.get(name)
        if before is not None and before.metadata.uid != found.metadata.uid:
            self._on_delete(before)
            before = None
        self._objects[name] = found
        self._undecodable.pop(name, None)
        if before is not None and before != found:
            self._on_update(Update(before, found))
        self._enqueue(name)

    def _on_delete(self, gone: CachedKind) -> None:
        name = gone.metadata.name
        known = self._objects.get(name)
        if known is not None and known.metadata.uid == gone.metadata.uid:
            del self._objects[name]
        self._tombstones.setdefault(name, []).append(gone)
        self._enqueue(name)

    def _on_undecodable(self, found: UndecodableObject) -> None:
        """Its end, too, may come in a form that cannot be read."""
        if found.is_deleted:
            self._undecodable.pop(found.name, None)
            known = self._objects.get(found.name)
            if known is not None and known.metadata.uid == found.uid:
                self._on_delete(known)
            else:  # nobody ever knew what it was, but a record of it may be there
                self._enqueue(found.name)
        elif self._undecodable.get(found.name) != found:  # told once, and not at every list
            self._undecodable[found.name] = found
            log.warning(
                "object cannot be read, and is left alone", object=found.name, why=found.error
            )
            self._enqueue(found.name)


INITIAL_LIST: Final = "they are being listed"


class _WatchError(NamedTuple):
    error: str
    since: float


class WatchHealth:
    """Of the kinds that are named at the start nothing has been seen yet."""

    def __init__(
        self,
        kinds: Iterable[str],
        where: str = "",
        grace: timedelta = timedelta(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A problem counts after `grace`, but at once with what has never been seen."""
        self._where = where
        self._grace = grace.total_seconds()
        self._clock = clock
        self._errors = {kind: _WatchError(INITIAL_LIST, float("-inf")) for kind in kinds}

    @property
    def unready(self) -> str | None:
        """What cannot be seen, and why; None if all can be."""
        now = self._clock()
        lasting = [
            (kind, problem.error)
            for kind, problem in self._errors.items()
            if now - problem.since >= self._grace
        ]
        # What waits for the first list has no problem of its own where another kind has one.
        told = [one for one in lasting if one[1] != INITIAL_LIST] or lasting
        return "; ".join(f"cannot see {kind}{self._where}: {why}" for kind, why in told) or None

    def listed(self, kind: str) -> None:
        """It has been seen. Whether it still is, after a problem, the watch that follows tells."""
        if (known := self._errors.get(kind)) is not None and known.error == INITIAL_LIST:
            del self._errors[kind]

    def report(self, kind: str, error: str) -> None:
        """Why this kind cannot be seen now; empty if it can."""
        if not error:
            self._errors.pop(kind, None)
            return
        known = self._errors.get(kind)
        since = self._clock() if known is None else known.since
        self._errors[kind] = _WatchError(error, since)
