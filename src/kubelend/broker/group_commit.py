"""Group commit: changes decided in one iteration of the event loop become durable in one transaction.

The writer submits changes in the order in which it made them, and waits. While one group is being committed
in the store's thread, the next one accumulates. A failed commit fails everything submitted since, because
all of it was decided on state that is not durable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from kubelend.broker.ports import OpenStore, Store
from kubelend.core.errors import KubelendError, NotReady, StoreFailed
from kubelend.core.events import Change, StoreLag, WorkingSet

OnCommit = Callable[[Sequence[Change], float], None]
"""Called for each durable group, with the duration of its commit in seconds."""

OnFailure = Callable[[Exception], None]
Result = TypeVar("Result")

WRITTEN_POLL_SECONDS: Final = 0.05
WRITTEN_TIMEOUT_SECONDS: Final = 10.0
"""How long a broker that stops waits for the objects of its store."""


class _CommitGroup:
    """Changes that become durable together, and the futures that wait for it."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.revision = 0
        self.waiters: list[asyncio.Future[None]] = []

    def notify_waiters(self, failure: Exception | None = None) -> None:
        for waiter in self.waiters:
            if waiter.done():
                continue  # its caller was cancelled
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)


class GroupCommit:
    """Owns the store and its thread; bound to one event loop."""

    def __init__(self, open_store: OpenStore, on_commit: OnCommit, on_failed: OnFailure) -> None:
        self._open_store = open_store
        self._store: Store | None = None
        self._on_commit = on_commit
        self._on_failed = on_failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._pending: _CommitGroup | None = None
        self._in_flight: _CommitGroup | None = None
        self._queries: set[Future[Any]] = set()
        """Queries submitted to the store's thread that may still run, also if their caller was cancelled."""
        self._durable_revision = 0
        """The last durable revision that this process knows of."""
        self._failure: Exception | None = NotReady("the store is not loaded yet")

    async def load(self) -> WorkingSet:
        """Reopens the store, reads the working set, and starts accepting changes."""
        records = await self._in_thread(self._reopen)
        self._check_not_older(records.revision)
        self._durable_revision = records.revision
        self._failure = None
        return records

    async def query(self, query: Callable[[Store], Result]) -> Result:
        """Runs a query in the store's thread; commits wait meanwhile."""
        if self._failure is not None:
            raise self._failure
        future = self._thread.submit(query, self._open_store_or_raise())
        self._queries.add(future)
        future.add_done_callback(self._queries.discard)
        return await asyncio.wrap_future(future)

    def submit(self, changes: Sequence[Change], revision: int) -> None:
        """Queues changes for the next commit. Never waits, so that deciding and submitting are atomic."""
        if self._failure is not None:
            raise self._failure
        if self._pending is None:
            self._pending = _CommitGroup()
            # Deferred, so that other changes of this event loop iteration join the same group.
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.changes.extend(changes)
        self._pending.revision = revision

    async def wait_durable(self) -> None:
        """Waits until everything submitted so far is durable."""
        newest = self._pending or self._in_flight
        if newest is not None:
            waiter = asyncio.get_running_loop().create_future()
            newest.waiters.append(waiter)
            await waiter

    async def wait_written(self) -> None:
        """Waits until everything submitted so far is also shown where users see it."""
        await self.wait_durable()
        target = self.lag.committed
        while self.lag.written < target:
            if self._failure is not None:
                raise self._failure
            await asyncio.sleep(WRITTEN_POLL_SECONDS)

    @property
    def lag(self) -> StoreLag:
        return StoreLag() if self._store is None else self._store.lag()

    def fail(self, problem: Exception) -> None:
        """Drops the pending group, and rejects changes until the store is loaded again.

        The group in flight is complete, and is committed.
        """
        gathering, self._pending = self._pending, None
        self._failure = problem
        if gathering is not None:
            gathering.notify_waiters(problem)
        self._on_failed(problem)

    async def step_down(self, failure: Exception) -> None:
        """Commits what was submitted, rejects new changes, and closes the store."""
        while self._pending or self._in_flight:
            await asyncio.gather(self.wait_durable(), return_exceptions=True)
        self._failure = failure
        await self._in_thread(self._close_store)

    async def close(self) -> None:
        """Steps down and ends the store's thread."""
        with suppress(TimeoutError, KubelendError):  # the next load shows the rest
            async with asyncio.timeout(WRITTEN_TIMEOUT_SECONDS):
                await self.wait_written()
        await self.step_down(NotReady("the broker is stopping"))
        self._thread.shutdown()

    def _flush(self) -> None:
        """Starts to commit the pending group, unless a commit is in flight."""
        if self._in_flight is not None or self._pending is None:
            return
        group = self._in_flight = self._pending
        self._pending = None
        began = time.perf_counter()
        try:
            write = self._prepared(group)
        except Exception as error:  # noqa: BLE001 - every failure must reach the waiters
            self._in_flight = None
            self._fail(group, error)
            return
        written = asyncio.get_running_loop().run_in_executor(self._thread, write)
        written.add_done_callback(partial(self._on_written, group, began))

    def _prepared(self, group: _CommitGroup) -> Callable[[], None]:
        """Returns what the store's thread has to do: the whole commit while a query runs there."""
        store = self._open_store_or_raise()
        if self._queries:
            return partial(store.commit, group.changes, group.revision)
        return store.prepare(group.changes, group.revision)

    def _on_written(self, group: _CommitGroup, began: float, written: asyncio.Future[None]) -> None:
        self._in_flight = None
        problem = written.exception()
        if problem is not None:
            self._fail(group, problem)
            return
        self._durable_revision = group.revision
        try:
            self._on_commit(group.changes, time.perf_counter() - began)
        finally:  # the group is durable even if a listener fails
            group.notify_waiters()
            # After the waiters: they respond first, and requests that arrive meanwhile join the next group.
            asyncio.get_running_loop().call_soon(self._flush)

    def _fail(self, group: _CommitGroup, problem: BaseException) -> None:
        failure = problem if isinstance(problem, StoreFailed) else StoreFailed(str(problem))
        group.notify_waiters(failure)
        self.fail(failure)

    def _reopen(self) -> WorkingSet:
        """Opens a new connection, because one that has failed is not reused."""
        self._close_store()
        self._store = self._open_store()
        return self._store.load()

    def _check_not_older(self, revision: int) -> None:
        """Detects a store file that was deleted, or replaced by a backup."""
        if revision < self._durable_revision:
            raise StoreFailed(
                f"the store has lost committed data: it is at revision {revision},"
                f" not {self._durable_revision}",
                hint="restore the right store, or restart the broker to continue with this one",
            )

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _open_store_or_raise(self) -> Store:
        if self._store is None:
            raise NotReady("the store is not open", hint="try again in a moment")
        return self._store

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
