"""Local objects as YAML files that people can read, create, edit and delete: for a cluster without
Kubernetes.

Files are `<directory>/<plural>/<namespace>.<name>.yaml`. `ObjectDirectory` reads and writes them in a
thread of its own, because a disk may be slow; `FileObjects` lives in the event loop. A new file is a
new object, an edited one a changed object, a removed one a deleted object. A file that was modified
just now is read only once it has settled, because its writer may not be done; a file that has just
vanished is checked again, because editors save like that. Nothing waits for that while it holds a lock:
it would block other objects and other processes.
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
"""Seconds that a write waits for a busy file; then the caller retries."""

FIRST_PATIENCE: Final = 2.0
"""Seconds that the first scan of a kind waits for busy files, so that the first list is complete."""

CLOSES_WITHIN: Final = 2.0
MOST_TOLD: Final = 3
"""How many errors are listed; the others are counted."""

log = structlog.get_logger("kubelend.objects")

Answer = TypeVar("Answer")


class FileObjects:
    """`agent.ports.LocalObjects` in a directory of YAML files."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], datetime],
        poll: timedelta = POLL,
        settle: timedelta = folders.SETTLE,
    ) -> None:
        """`poll`: how often watches scan the disk. `settle`: how long a file is unmodified before it
        is read.
        """
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
        """The files that cannot be used, each with its error; empty if there are none.

        As of the last scan, so it is cheap to read.
        """
        files = [f"{file}: {why}" for file, why in sorted(self._folder.problems.items())]
        errors = [*sorted(set(self._troubles.values())), *files]
        more = [f"and {len(errors) - MOST_TOLD} more"] if len(errors) > MOST_TOLD else []
        return "; ".join([*errors[:MOST_TOLD], *more])

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
        """Finish running jobs and stop the thread. Does not wait for a disk that hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        last = asyncio.wrap_future(self._worker.submit(lambda: None))
        self._worker.shutdown(wait=False)
        await asyncio.wait([last], timeout=CLOSES_WITHIN)
        last.cancel()  # its result must not reach a closed event loop

    async def _change(self, job: Callable[[], Answer]) -> Answer:
        """Retries while the file is busy, without blocking other objects."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while True:
            try:
                return await self._do(job)
            except folders.Restless as problem:
                if loop.time() >= deadline:
                    raise Unavailable(str(problem), hint="the agent will retry") from problem
            await asyncio.sleep(self._nap)

    async def _scan(self, kind: type[Object]) -> bool:
        """Scan the disk; True if files are busy."""
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
        """Scan the disk and report errors; scan sooner again if files are busy."""
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
        """For a change made here, or until the next scan is due; one scan serves all watches."""
        loop = asyncio.get_running_loop()
        await news.wait(max(self._due[kind] - loop.time(), 0))
        if loop.time() >= self._due[kind]:
            await self._look(kind)

    def _report(self, kind: type[Object], trouble: str) -> None:
        if self._troubles.get(kind) != trouble:
            self._troubles[kind] = trouble
            log.warning("Scan of object files failed, will retry", kind=kind.kind, error=trouble)

    async def _do(self, job: Callable[[], Answer]) -> Answer:
        """Run a job in the thread. Once started it completes and reaches the watches, even if the
        caller is cancelled.
        """
        if self._is_closed:
            raise Unavailable("the object store is closed")
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
    """Result or error of a job, and what it changed either way."""

    answer: Answer | None
    error: KubelendError | None
    changes: list[Object | Deleted]
