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
from kubelend.sources.folders import ObjectDirectory
from kubelend.sources.shelves import WatchableStore, WatchQueue
from kubelend.wire.objects import Kind, Object

POLL_INTERVAL: Final = timedelta(milliseconds=200)

BUSY_TIMEOUT: Final = 0.5
"""Seconds that a write waits for a busy file; then the caller retries."""

FIRST_SCAN_TIMEOUT: Final = 2.0
"""Seconds that the first scan of a kind waits for busy files, so that the first list is complete."""

CLOSE_TIMEOUT: Final = 2.0
MAX_ERRORS_LISTED: Final = 3
"""How many errors are listed; the others are counted."""

log = structlog.get_logger("kubelend.objects")

JobValue = TypeVar("JobValue")


class FileObjects:
    """`agent.ports.LocalObjects` in a directory of YAML files."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], datetime],
        poll: timedelta = POLL_INTERVAL,
        settle: timedelta = folders.SETTLE_TIME,
    ) -> None:
        """`poll`: how often watches scan the disk. `settle`: how long a file is unmodified before it
        is read.
        """
        self._clock = clock
        self._directory = ObjectDirectory(directory, clock(), settle)
        self._poll = poll.total_seconds()
        self._busy_delay = min(self._poll, settle.total_seconds())
        self._retry_delay = min(max(settle.total_seconds() / 4, 0.001), 0.02)
        self._store = WatchableStore()
        self._worker = ThreadPoolExecutor(1, "objects")
        self._is_closed = False
        self._scanned: set[type[Object]] = set()
        self._due: dict[type[Object], float] = {}
        self._scan_errors: dict[type[Object], str] = {}

    @property
    def problem(self) -> str:
        """The files that cannot be used, each with its error; empty if there are none.

        As of the last scan, so it is cheap to read.
        """
        files = [f"{file}: {why}" for file, why in sorted(self._directory.problems.items())]
        errors = [*sorted(set(self._scan_errors.values())), *files]
        more = (
            [f"and {len(errors) - MAX_ERRORS_LISTED} more"]
            if len(errors) > MAX_ERRORS_LISTED
            else []
        )
        return "; ".join([*errors[:MAX_ERRORS_LISTED], *more])

    async def list(self, kind: type[Kind]) -> list[Kind]:
        await self._scan(kind)
        return self._store.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        await self._run(lambda: self._directory.refresh(kind, key))
        return self._store.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        return await self._run_until_settled(lambda: self._directory.apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        return await self._run_until_settled(lambda: self._directory.set_status(wanted))

    async def delete(self, kind: type[Kind], key: str) -> None:
        await self._run_until_settled(lambda: self._directory.delete(kind, key))

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        await self._scan_and_report(kind)
        while kind in self._scan_errors:
            await asyncio.sleep(self._poll)
            await self._scan_and_report(kind)
        with self._store.subscribe(kind) as news:
            yield Listed(self._store.list(kind))
            while True:
                while (change := news.pop()) is not None:
                    yield change
                await self._wait_for_change(kind, news)

    async def close(self) -> None:
        """Finish running jobs and stop the thread. Does not wait for a disk that hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        last = asyncio.wrap_future(self._worker.submit(lambda: None))
        self._worker.shutdown(wait=False)
        await asyncio.wait([last], timeout=CLOSE_TIMEOUT)
        last.cancel()  # its result must not reach a closed event loop

    async def _run_until_settled(self, job: Callable[[], JobValue]) -> JobValue:
        """Retries while the file is busy, without blocking other objects."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BUSY_TIMEOUT
        while True:
            try:
                return await self._run(job)
            except folders.FileBusy as problem:
                if loop.time() >= deadline:
                    raise Unavailable(str(problem), hint="the agent will retry") from problem
            await asyncio.sleep(self._retry_delay)

    async def _scan(self, kind: type[Object]) -> bool:
        """Scan the disk; True if files are busy."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FIRST_SCAN_TIMEOUT
        while await self._run(lambda: self._directory.scan(kind)):
            if kind in self._scanned or loop.time() >= deadline:
                self._scanned.add(kind)
                return True
            await asyncio.sleep(self._retry_delay)
        self._scanned.add(kind)
        return False

    async def _scan_and_report(self, kind: type[Object]) -> None:
        """Scan the disk and report errors; scan sooner again if files are busy."""
        loop = asyncio.get_running_loop()
        self._due[kind] = loop.time() + self._poll
        try:
            is_restless = await self._scan(kind)
        except Unavailable as trouble:
            self._report(kind, str(trouble))
            return
        self._scan_errors.pop(kind, None)
        if is_restless:
            self._due[kind] = loop.time() + self._busy_delay

    async def _wait_for_change(self, kind: type[Object], watch: WatchQueue[Kind]) -> None:
        """For a change made here, or until the next scan is due; one scan serves all watches."""
        loop = asyncio.get_running_loop()
        await watch.wait(max(self._due[kind] - loop.time(), 0))
        if loop.time() >= self._due[kind]:
            await self._scan_and_report(kind)

    def _report(self, kind: type[Object], trouble: str) -> None:
        if self._scan_errors.get(kind) != trouble:
            self._scan_errors[kind] = trouble
            log.warning("Scan of object files failed, will retry", kind=kind.kind, error=trouble)

    async def _run(self, job: Callable[[], JobValue]) -> JobValue:
        """Run a job in the thread. Once started it completes and reaches the watches, even if the
        caller is cancelled.
        """
        if self._is_closed:
            raise Unavailable("the object store is closed")
        now, loop = self._clock(), asyncio.get_running_loop()
        future = loop.run_in_executor(self._worker, self._run_in_thread, job, now)
        future.add_done_callback(self._publish_changes)
        done = await asyncio.shield(future)
        if done.error is not None:
            raise done.error
        return cast(JobValue, done.result)

    def _run_in_thread(self, job: Callable[[], JobValue], now: datetime) -> _JobResult[JobValue]:
        self._directory.now = now
        try:
            answer, error = job(), None
        except KubelendError as problem:
            answer, error = None, problem
        return _JobResult(answer, error, self._directory.pop_changes())

    def _publish_changes(self, future: asyncio.Future[_JobResult[JobValue]]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        for change in future.result().changes:
            if isinstance(change, Deleted):
                self._store.delete(cast(Object, change.last_state))
            else:
                self._store.put(change)


class _JobResult(NamedTuple, Generic[JobValue]):
    """Result or error of a job, and what it changed either way."""

    result: JobValue | None
    error: KubelendError | None
    changes: list[Object | Deleted]
