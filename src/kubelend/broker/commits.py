"""Group commit: what was decided in one turn of the event loop becomes durable in one transaction.

The service hands over changes in the order in which it made them, and waits. While one group is being
committed, in the store's own thread, the next one gathers. A failed write fails everything handed over
since, because all of it was decided on what was not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kubelend.broker.ports import OpenStore, Store
from kubelend.core.errors import NotReady, StoreFailed
from kubelend.core.events import Change
from kubelend.core.records import Records

Landed = Callable[[Sequence[Change], float], None]
"""Told of each group that became durable, with the seconds it took."""

Failed = Callable[[Exception], None]
Result = TypeVar("Result")


class _Group:
    """Changes that become durable together, and who waits for that."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.revision = 0
        self.waiters: list[asyncio.Future[None]] = []

    def wake(self, failure: Exception | None = None) -> None:
        for waiter in self.waiters:
            if waiter.done():
                continue  # its caller has gone away
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)


class GroupCommit:
    """The only one who touches the store; lives in one event loop."""

    def __init__(self, open_store: OpenStore, on_landed: Landed, on_failed: Failed) -> None:
        self._open_store = open_store
        self._store: Store | None = None
        self._on_landed = on_landed
        self._on_failed = on_failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._gathering: _Group | None = None
        self._flying: _Group | None = None
        self._questions: set[Future[Any]] = set()
        """What the store's thread was asked, and may be reading yet, also if nobody waits any more."""
        self._durable = 0
        """The revision up to which everything was kept, as far as this process knows."""
        self._failure: Exception | None = NotReady("the store is not loaded yet")

    async def load(self) -> Records:
        """Open the store anew and read the working set; from here on changes are taken."""
        records = await self._in_thread(self._reopen)
        self._check_same(records.revision)
        self._durable = records.revision
        self._failure = None
        return records

    async def ask(self, question: Callable[[Store], Result]) -> Result:
        """Read what only the store has, in its thread; what is being written waits meanwhile."""
        if self._failure is not None:
            raise self._failure
        asked = self._thread.submit(question, self._opened())
        self._questions.add(asked)
        asked.add_done_callback(self._questions.discard)
        return await asyncio.wrap_future(asked)

    def submit(self, changes: Sequence[Change], revision: int) -> None:
        """Have these changes kept. Never waits, so that deciding and recording are one stretch."""
        if self._failure is not None:
            raise self._failure
        if self._gathering is None:
            self._gathering = _Group()
            # Not at once: whoever else decides in this turn of the event loop joins the same group.
            asyncio.get_running_loop().call_soon(self._take_off)
        self._gathering.changes.extend(changes)
        self._gathering.revision = revision

    async def settled(self) -> None:
        """Wait until everything submitted so far is durable: the moment when it may be shown."""
        newest = self._gathering or self._flying
        if newest is not None:
            waiter = asyncio.get_running_loop().create_future()
            newest.waiters.append(waiter)
            await waiter

    def fail(self, problem: Exception) -> None:
        """Drop what gathers, and take nothing more before all is read anew.

        What is being written was handed over whole, and lands.
        """
        gathering, self._gathering = self._gathering, None
        self._failure = problem
        if gathering is not None:
            gathering.wake(problem)
        self._on_failed(problem)

    async def stand_down(self, failure: Exception) -> None:
        """Finish what has been handed over, take nothing more, and let go of the store."""
        while self._gathering or self._flying:
            await asyncio.gather(self.settled(), return_exceptions=True)
        self._failure = failure
        await self._in_thread(self._let_go)

    async def close(self) -> None:
        """The same for good."""
        await self.stand_down(NotReady("the broker is stopping"))
        self._thread.shutdown()

    def _take_off(self) -> None:
        """Write the group that has gathered, unless the one before is still being written."""
        if self._flying is not None or self._gathering is None:
            return
        group = self._flying = self._gathering
        self._gathering = None
        began = time.perf_counter()
        try:
            write = self._prepared(group)
        except Exception as problem:  # noqa: BLE001 - whoever waits is to hear it, whatever it is
            self._flying = None
            self._fail(group, problem)
            return
        written = asyncio.get_running_loop().run_in_executor(self._thread, write)
        written.add_done_callback(partial(self._land, group, began))

    def _prepared(self, group: _Group) -> Callable[[], None]:
        """What is left to be done in the store's thread: all of it, if that reads there just now."""
        store = self._opened()
        if self._questions:
            return partial(store.commit, group.changes, group.revision)
        return store.prepare(group.changes, group.revision)

    def _land(self, group: _Group, began: float, written: asyncio.Future[None]) -> None:
        self._flying = None
        problem = written.exception()
        if problem is not None:
            self._fail(group, problem)
            return
        self._durable = group.revision
        try:
            self._on_landed(group.changes, time.perf_counter() - began)
        finally:  # whatever listeners do, the group is durable, and its callers are to hear so
            group.wake()
            # Behind those who wake: they answer, and what has come in meanwhile joins the next group.
            asyncio.get_running_loop().call_soon(self._take_off)

    def _fail(self, group: _Group, problem: BaseException) -> None:
        failure = problem if isinstance(problem, StoreFailed) else StoreFailed(str(problem))
        group.wake(failure)
        self.fail(failure)

    def _reopen(self) -> Records:
        """A connection that has failed is not trusted again."""
        self._let_go()
        self._store = self._open_store()
        return self._store.load()

    def _check_same(self, revision: int) -> None:
        """A file that was taken away is made anew, empty; a backup may have taken its place."""
        if revision < self._durable:
            raise StoreFailed(
                f"the store has lost what it kept: it is at revision {revision}, not {self._durable}",
                hint="put the right one back, or restart the broker to go on with this one",
            )

    def _let_go(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _opened(self) -> Store:
        if self._store is None:
            raise NotReady("the store is not open", hint="try again in a moment")
        return self._store

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
