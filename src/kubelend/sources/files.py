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

PATIENCE: Final = 0.5
"""Seconds that a change waits for a file that somebody is at; then it is the caller's to try again."""

FIRST_PATIENCE: Final = 2.0
"""Seconds that the first look at a kind waits: who asks what there is must not hear of less."""

CLOSES_WITHIN: Final = 2.0
MOST_TOLD: Final = 3
"""Troubles that are named, of all that there are."""

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
        self._nap = min(max(settle.total_seconds() / 4, 0.001), 0.02)
        self._shelf = Shelf()
        self._worker = ThreadPoolExecutor(1, "objects")
        self._is_closed = False
        self._looked_at: set[type[Object]] = set()
        self._due: dict[type[Object], float] = {}
        self._troubles: dict[type[Object], str] = {}

    @property
    def problem(self) -> str:
        """Why not all of the files can be used, each with its reason; empty if they can.

        As of the last look, so it costs nothing to ask often.
        """
        files = [f"{file}: {why}" for file, why in sorted(self._folder.problems.items())]
        told = [*sorted(set(self._troubles.values())), *files]
        more = [f"and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else []
        return "; ".join([*told[:MOST_TOLD], *more])

    async def list(self, kind: type[Kind]) -> list[Kind]:
        await self._scan(kind)
        return self._shelf.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        await self._do(lambda: self._folder.glance(kind, key))
        return self._shelf.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        return await self._change(lambda: self._folder.apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        return await self._change(lambda: self._folder.set_status(wanted))

    async def delete(self, kind: type[Kind], key: str) -> None:
        await self._change(lambda: self._folder.delete(kind, key))

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
        """Finish what has begun, and let the thread go. A disk that hangs is not waited for."""
        if self._is_closed:
            return
        self._is_closed = True
        last = asyncio.wrap_future(self._worker.submit(lambda: None))
        self._worker.shutdown(wait=False)
        await asyncio.wait([last], timeout=CLOSES_WITHIN)
        last.cancel()  # or its end would be told to a loop that may be gone by then

    async def _change(self, job: Callable[[], Answer]) -> Answer:
        """Once more, if somebody is at the file. Meanwhile all other objects have their turns."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while True:
            try:
                return await self._do(job)
            except folders.Restless as problem:
                if loop.time() >= deadline:
                    raise Unavailable(str(problem), hint="it is tried again") from problem
            await asyncio.sleep(self._nap)

    async def _scan(self, kind: type[Object]) -> bool:
        """Look at the disk; True if something there does not rest yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FIRST_PATIENCE
        while await self._do(lambda: self._folder.scan(kind)):
            if kind in self._looked_at or loop.time() >= deadline:
                self._looked_at.add(kind)
                return True
            await asyncio.sleep(self._nap)
        self._looked_at.add(kind)
        return False

    async def _look(self, kind: type[Object]) -> None:
        """At the disk, and sooner again if something there does not rest yet."""
        loop = asyncio.get_running_loop()
        self._due[kind] = loop.time() + self._poll
        try:
            is_restless = await self._scan(kind)
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
        if self._is_closed:
            raise Unavailable("the objects are closed")
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
