"""The blocking interface of the Kubernetes store.

`KubernetesStore.open` is for the broker, `open_readonly` for readers beside it. The port is blocking, and
the client is not: each call runs in an event loop of the store's own. See docs/adr/0019.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from kubelend.core.errors import StoreFailed
from kubelend.core.events import Change
from kubelend.core.journal import Head, Line
from kubelend.core.models import Reservation, ReservationId
from kubelend.core.records import Records
from kubelend.kube.access import Access
from kubelend.kube.client import Client
from kubelend.stores import batches, kube_failures
from kubelend.stores.kube_book import Book

Connect = Callable[[Access], AbstractAsyncContextManager[Client]]
Result = TypeVar("Result")

_PARTING: Final = 10
"""Iterations of the event loop until all closed sockets are released."""


class KubernetesStore:
    """Stores records in one namespace of a cluster."""

    def __init__(self, access: Access, namespace: str, *, is_writable: bool) -> None:
        self._access = access
        self._namespace = namespace
        self._is_writable = is_writable
        self._runner: asyncio.Runner | None = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._book: Book | None = None

    @classmethod
    def open(
        cls,
        access: Access,
        namespace: str,
        *,
        archive_for: timedelta = batches.ARCHIVE_FOR,
        connect: Connect = Client.open,
    ) -> KubernetesStore:
        """Open the store for writing, or create it. A broker that had it open can no longer write."""
        store = cls(access, namespace, is_writable=True)
        store.begin(archive_for, connect)
        return store

    @classmethod
    def open_readonly(
        cls, access: Access, namespace: str, *, connect: Connect = Client.open
    ) -> KubernetesStore:
        """Open an existing store, also while a broker uses it; writes nothing."""
        store = cls(access, namespace, is_writable=False)
        store.begin(batches.ARCHIVE_FOR, connect)
        return store

    def begin(self, archive_for: timedelta, connect: Connect) -> None:
        """Connect, and read the head."""
        try:
            self._run(self._begin(archive_for, connect))
        except BaseException:
            self.close()
            raise

    def load(self) -> Records:
        ledger = self._opened()
        return self._run(ledger.load() if self._is_writable else ledger.look())

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        self._run(self._opened().commit(changes, revision))

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        return partial(self.commit, changes, revision)

    def archived(self, reservation: ReservationId) -> Reservation | None:
        return self._run(self._opened().archived(reservation))

    def lines(self, after: int, limit: int) -> list[Line]:
        return self._run(self._opened().lines(after, limit))

    def journal_ends(self) -> tuple[Head, Head]:
        state = self._opened().keeper.state
        return state.start.head, state.end.head

    def check(self) -> None:
        self._run(self._opened().keeper.check())

    def close(self) -> None:
        runner, self._runner, self._book = self._runner, None, None
        if runner is not None:
            with runner:
                runner.run(self._end())

    async def _begin(self, archive_for: timedelta, connect: Connect) -> None:
        client = await self._stack.enter_async_context(connect(self._access))
        self._book = ledger = Book(client, self._namespace, archive_for)
        await (ledger.keeper.take_over() if self._is_writable else ledger.keeper.read())

    async def _end(self) -> None:
        await self._stack.aclose()
        for _ in range(_PARTING):  # the loop releases sockets after they are closed
            await asyncio.sleep(0)

    def _opened(self) -> Book:
        if self._book is None:
            raise StoreFailed("the store is closed", hint="open it again")
        return self._book

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._runner is None:
            raise StoreFailed("the store is closed", hint="open it again")
        with kube_failures.translated(self._access.server, self._namespace):
            return self._runner.run(_awake(work))


async def _awake(work: Coroutine[Any, Any, Result]) -> Result:
    """The loop is idle between calls: let it notice connections that were closed meanwhile."""
    for _ in range(2):
        await asyncio.sleep(0)
    return await work
