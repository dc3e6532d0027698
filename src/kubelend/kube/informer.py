"""Informer: lists and watches the objects of a kind, and caches them.

The agent's source, the store and the controllers watch their objects with it. Ended watches, disconnects
and expired resource versions are handled here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import structlog

from kubelend.core.errors import Gone, KubelendError, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.kube.client import Client
from kubelend.kube.codec import Listing, UndecodableObject, WatchEvent
from kubelend.kube.resources import Kind, Resource
from kubelend.wire.objects import Object, ObjectCache

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
    report: WatchReport = lambda _: None,
    backoff: Backoff = WATCH_BACKOFF,
    retries_all: bool = True,
    **selected: str,
) -> AsyncGenerator[Change[Kind], None]:
    """List and watch until cancelled. Yields `Listed` first and after each relist, else single changes.

    All errors are retried with backoff, because all can be fixed from outside: permissions granted, CRDs
    applied, servers started; only the retryable ones without `retries_all`. `report` is called when the
    watch fails or recovers. `selected`: the selectors `labels` and `fields`.
    """
    watcher = _ListWatcher(
        partial(client.list, resource, namespace, **selected),
        partial(client.watch, resource, namespace, **selected),
        report,
    )
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
            if not (retries_all or error.retryable):
                raise
            failure = error
        if watcher.succeeded:
            delays = backoff.delays()
        elif failure is None:
            failure = Unavailable(f"watches of {resource} end immediately")
        if failure is not None:
            watcher.report_error(str(failure))
            await asyncio.sleep(max(next(delays), failure.retry_after))


class _ListWatcher(Generic[Kind]):
    """State of the list-and-watch loop across watches."""

    def __init__(
        self,
        list_objects: Callable[[], Awaitable[Listing[Kind]]],
        watch: Callable[..., AsyncGenerator[WatchEvent[Kind], None]],
        report: WatchReport,
    ) -> None:
        self._list = list_objects
        self._watch = watch
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
            listing = await self._list()
            self.since = listing.resource_version
            yield Listed(listing.objects, listing.undecodable)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with contextlib.aclosing(self._watch(since=self.since)) as events:
                async for event in events:
                    if (change := self._to_change(event)) is not None:
                        yield change
        finally:
            self.succeeded |= clock() - began > MIN_WATCH_SECONDS

    def report_error(self, error: str) -> None:
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


CachedKind = TypeVar("CachedKind", bound=Object)

log = structlog.get_logger("kubelend.controllers")


class InformerCache(ObjectCache[CachedKind]):
    """Cache by name, which also has the objects that cannot be decoded.

    `on_change` is called with the old and new state of a changed object.
    """

    def __init__(
        self,
        enqueue: Callable[[str], None],
        on_change: Callable[[CachedKind, CachedKind], None] = lambda *_: None,
    ) -> None:
        super().__init__(enqueue)
        self._on_change = on_change
        self._undecodable: dict[str, UndecodableObject] = {}

    def key_of(self, found: CachedKind) -> str:
        return found.metadata.name

    def undecodable(self, name: str) -> UndecodableObject | None:
        """The object of this name if it cannot be decoded now; None if it can or does not exist."""
        return self._undecodable.get(name)

    def enqueue_all(self) -> None:
        """Enqueue all names, after the ledger was reloaded or this broker became leader."""
        for name in dict.fromkeys((*self._objects, *self._tombstones, *self._undecodable)):
            self._enqueue(name)

    def handle(self, change: Change[CachedKind]) -> None:
        match change:
            case Listed(objects, undecodable):
                for name in self._undecodable.keys() - {one.name for one in undecodable}:
                    del self._undecodable[name]
                self.on_list(objects, {one.uid for one in undecodable})
                for one in undecodable:
                    self._on_undecodable(one)
            case Deleted(found):
                self.on_delete(found)
            case UndecodableObject():
                self._on_undecodable(change)
            case found:
                self.on_update(found)

    def triggers(self, before: CachedKind, after: CachedKind) -> bool:
        if before != after:
            self._on_change(before, after)
        return True

    def on_update(self, found: CachedKind) -> None:
        self._undecodable.pop(found.metadata.name, None)
        super().on_update(found)

    def _on_undecodable(self, found: UndecodableObject) -> None:
        """A deletion may be undecodable, too."""
        if found.is_deleted:
            self._undecodable.pop(found.name, None)
            known = self.find(found.name)
            if known is not None and known.metadata.uid == found.uid:
                self.on_delete(known)
            else:  # it was never decoded, but a record of it may be stored
                self._enqueue(found.name)
        elif self._undecodable.get(found.name) != found:  # not again at every list
            self._undecodable[found.name] = found
            error = found.error
            log.warning("Skipping object that cannot be decoded", name=found.name, error=error)
            self._enqueue(found.name)


INITIAL_LIST: Final = "waiting for the initial list"


class _WatchError(NamedTuple):
    error: str
    since: float


class WatchHealth:
    """Errors of the watches of several kinds. Each kind is unready until its first list."""

    def __init__(
        self,
        kinds: Iterable[str],
        where: str = "",
        grace: timedelta = timedelta(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An error makes a kind unready after `grace`; before its first list, immediately."""
        self._where = where
        self._grace = grace.total_seconds()
        self._clock = clock
        self._errors = {kind: _WatchError(INITIAL_LIST, float("-inf")) for kind in kinds}

    @property
    def unready(self) -> str | None:
        """Which kinds cannot be watched, with the errors; None if all can."""
        now = self._clock()
        lasting = [
            (kind, failure.error)
            for kind, failure in self._errors.items()
            if now - failure.since >= self._grace
        ]
        # A kind that waits for its first list is not reported while another kind has an error.
        reported = [one for one in lasting if one[1] != INITIAL_LIST] or lasting
        texts = (f"cannot watch {kind}{self._where}: {error}" for kind, error in reported)
        return "; ".join(texts) or None

    def listed(self, kind: str) -> None:
        """The kind was listed. An earlier error is only cleared by the watch that follows."""
        if (known := self._errors.get(kind)) is not None and known.error == INITIAL_LIST:
            del self._errors[kind]

    def report(self, kind: str, error: str) -> None:
        """Set the error of a kind; empty if its watch works."""
        if not error:
            self._errors.pop(kind, None)
            return
        known = self._errors.get(kind)
        since = self._clock() if known is None else known.since
        self._errors[kind] = _WatchError(error, since)
