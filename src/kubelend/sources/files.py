"""Local objects as files that people can read, drop in, edit and remove: a cluster without Kubernetes.

`apps.agent` uses it beside a simulated cluster. The files and what they mean are the work of
`folders.Folder`, in a thread of its own, for a disk may be slow; this side of it lives in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar, cast

import structlog

from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.sources import folders
from kubelend.sources.folders import Folder
from kubelend.sources.shelves import Shelf, Subscription
from kubelend.wire.objects import Kind, Object

POLL: Final = timedelta(milliseconds=200)

log = structlog.get_logger("kubelend.objects")

Answer = TypeVar("Answer")


class FileObjects:
    """`agent.ports.LocalObjects` that outlive the process, in a directory of YAML files."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], datetime],
        poll: timedelta = POLL,
        settle: timedelta = folders.SETTLE,
    ) -> None:
        """`poll`: how often watches look at the disk. `settle`: how long a file rests before it is read."""
        self._clock = clock
        self._folder = Folder(directory, clock(), settle)
        self._poll = poll.total_seconds()
        self._soon = min(self._poll, settle.total_seconds())
        self._shelf = Shelf()
        self._worker = ThreadPoolExecutor(1, "objects")
        self._due: dict[type[Object], float] = {}
        self._troubles: dict[type[Object], str] = {}

    @property
    def problem(self) -> str:
        """Why not all of the files can be used, each with its reason; empty if they can."""
        files = [f"{file}: {why}" for file, why in sorted(self._folder.problems.items())]
        return "; ".join([*sorted(set(self._troubles.values())), *files])

    async def list(self, kind: type[Kind]) -> list[Kind]:
        await self._do(lambda: self._folder.scan(kind))
        return self._shelf.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        await self._do(lambda: self._folder.glance(kind, key))
        return self._shelf.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        return await self._do(lambda: self._folder.apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        return await self._do(lambda: self._folder.set_status(wanted))

    async def delete(self, kind: type[Kind], key: str) -> None:
        await self._do(lambda: self._folder.delete(kind, key))

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        await self._look(kind)
        while kind in self._troubles:
            await asyncio.sleep(self._poll)
            await self._look(kind)
        with self._shelf.subscribed(kind) as news:
            yield Listed(self._shelf.list(kind))
            while True:
                while (change := news.take()) is not None:
                    yield change
                await self._wait(kind, news)

    async def close(self) -> None:
        """Finish what has begun, and let the thread go."""
        await asyncio.to_thread(self._worker.shutdown)

    async def _look(self, kind: type[Object]) -> None:
        """At the disk, and sooner again if something there does not rest yet."""
        loop = asyncio.get_running_loop()
        self._due[kind] = loop.time() + self._poll
        try:
            is_restless = await self._do(lambda: self._folder.scan(kind))
        except Unavailable as trouble:
            self._report(kind, str(trouble))
            return
        self._troubles.pop(kind, None)
        if is_restless:
            self._due[kind] = loop.time() + self._soon

    async def _wait(self, kind: type[Object], news: Subscription[Kind]) -> None:
        """For news of our own doing, or else until it is time to look; one look serves all watches."""
        loop = asyncio.get_running_loop()
        await news.wait(max(self._due[kind] - loop.time(), 0))
        if loop.time() >= self._due[kind]:
            await self._look(kind)

    def _report(self, kind: type[Object], trouble: str) -> None:
        if self._troubles.get(kind) != trouble:
            self._troubles[kind] = trouble
            log.warning("cannot look at files", kind=kind.kind, problem=trouble)

    async def _do(self, job: Callable[[], Answer]) -> Answer:
        """Have the thread do it. Once begun it is done, and told to the watches, whoever is cancelled."""
        now, loop = self._clock(), asyncio.get_running_loop()
        future = loop.run_in_executor(self._worker, self._work, job, now)
        future.add_done_callback(self._tell)
        done = await asyncio.shield(future)
        if done.error is not None:
            raise done.error
        return cast(Answer, done.answer)

    def _work(self, job: Callable[[], Answer], now: datetime) -> _Done[Answer]:
        self._folder.now = now
        try:
            answer, error = job(), None
        except KubelendError as problem:
            answer, error = None, problem
        return _Done(answer, error, self._folder.take_changes())

    def _tell(self, future: asyncio.Future[_Done[Answer]]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        for change in future.result().changes:
            if isinstance(change, Deleted):
                self._shelf.drop(cast(Object, change.found))
            else:
                self._shelf.put(change)


class _Done(NamedTuple, Generic[Answer]):
    """What came of a job: an answer or an error, and either way what has changed."""

    answer: Answer | None
    error: KubelendError | None
    changes: list[Object | Deleted]
