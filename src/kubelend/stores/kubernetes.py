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
from kubelend.core.journal import AuditLine, ChainHead
from kubelend.core.models import Reservation, ReservationId
from kubelend.core.records import WorkingSet
from kubelend.kube.access import KubeConfig
from kubelend.kube.client import Client
from kubelend.stores import batches, kube_failures
from kubelend.stores.kube_book import KubernetesLedger

ClientFactory = Callable[[KubeConfig], AbstractAsyncContextManager[Client]]
CallResult = TypeVar("CallResult")

_CLOSE_ITERATIONS: Final = 10
"""Iterations of the event loop until all closed sockets are released."""


class KubernetesStore:
    """Stores records in one namespace of a cluster."""

    def __init__(self, access: KubeConfig, namespace: str, *, is_writable: bool) -> None:
        self._access = access
        self._namespace = namespace
        self._is_writable = is_writable
        self._runner: asyncio.Runner | None = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._ledger: KubernetesLedger | None = None

    @classmethod
    def open(
        cls,
        access: KubeConfig,
        namespace: str,
        *,
        archive_for: timedelta = batches.ARCHIVE_FOR,
        connect: ClientFactory = Client.open,
    ) -> KubernetesStore:
        """Open the store for writing, or create it. A broker that had it open can no longer write."""
        store = cls(access, namespace, is_writable=True)
        store.connect(archive_for, connect)
        return store

    @classmethod
    def open_readonly(
        cls, access: KubeConfig, namespace: str, *, connect: ClientFactory = Client.open
    ) -> KubernetesStore:
        """Open an existing store, also while a broker uses it; writes nothing."""
        store = cls(access, namespace, is_writable=False)
        store.connect(batches.ARCHIVE_FOR, connect)
        return store

    def connect(self, archive_for: timedelta, connect: ClientFactory) -> None:
        """Connect, and read the head."""
        try:
            self._run(self._connect(archive_for, connect))
        except BaseException:
            self.close()
            raise

    def load(self) -> WorkingSet:
        ledger = self._open_ledger()
        return self._run(ledger.load() if self._is_writable else ledger.read_only())

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        self._run(self._open_ledger().commit(changes, revision))

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        return partial(self.commit, changes, revision)

    def archived(self, reservation: ReservationId) -> Reservation | None:
        return self._run(self._open_ledger().archived(reservation))

    def audit_lines(self, after: int, limit: int) -> list[AuditLine]:
        return self._run(self._open_ledger().lines(after, limit))

    def audit_log_bounds(self) -> tuple[ChainHead, ChainHead]:
        state = self._open_ledger().head.state
        return state.start.head, state.end.head

    def check_fencing(self) -> None:
        self._run(self._open_ledger().head.check_fencing())

    def close(self) -> None:
        runner, self._runner, self._ledger = self._runner, None, None
        if runner is not None:
            with runner:
                runner.run(self._disconnect())

    async def _connect(self, archive_for: timedelta, connect: ClientFactory) -> None:
        client = await self._stack.enter_async_context(connect(self._access))
        self._ledger = ledger = KubernetesLedger(client, self._namespace, archive_for)
        await (ledger.head.acquire() if self._is_writable else ledger.head.read())

    async def _disconnect(self) -> None:
        await self._stack.aclose()
        for _ in range(_CLOSE_ITERATIONS):  # the loop releases sockets after they are closed
            await asyncio.sleep(0)

    def _open_ledger(self) -> KubernetesLedger:
        if self._ledger is None:
            raise StoreFailed("the store is closed", hint="open it again")
        return self._ledger

    def _run(self, work: Coroutine[Any, Any, CallResult]) -> CallResult:
        if self._runner is None:
            raise StoreFailed("the store is closed", hint="open it again")
        with kube_failures.translate_api_errors(self._access.server, self._namespace):
            return self._runner.run(_after_pending_callbacks(work))


async def _after_pending_callbacks(work: Coroutine[Any, Any, CallResult]) -> CallResult:
    """The loop is idle between calls: let it notice connections that were closed meanwhile."""
    for _ in range(2):
        await asyncio.sleep(0)
    return await work
