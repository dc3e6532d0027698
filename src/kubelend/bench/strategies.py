"""Connection strategies: many clusters through a proxy's few connections, or each with its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol

from kubelend.bench import connections, progress
from kubelend.bench.connections import LoadConnection, RawResponse
from kubelend.core.errors import UnexpectedAnswer

_OK = 200
_PARALLEL_CLUSTERS = 32
"""Number of clusters that send in parallel."""


class ConnectionStrategy(Protocol):
    """Sends requests of many clusters."""

    async def send(self, number: int, request: bytes) -> RawResponse:
        """Sends a request of the cluster with this number and waits for the response."""

    def close(self) -> None:
        """Closes all connections."""


class Proxied:
    """A proxy that terminates TLS: uses any free connection, and opens a new one if there is none."""

    def __init__(self, port: int, context: ssl.SSLContext, most: int = 128) -> None:
        self._port = port
        self._context = context
        self._slots = asyncio.Semaphore(most)
        self._free: list[LoadConnection] = []

    async def send(self, number: int, request: bytes) -> RawResponse:  # noqa: ARG002 - the request contains the identity
        async with self._slots:
            connection = await self._acquire()
            answer = await connection.call(request)
            self._free.append(connection)
            return answer

    def close(self) -> None:
        for connection in self._free:
            connection.close()

    async def _acquire(self) -> LoadConnection:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed:
                return connection
        return await connections.open_connection(self._port, self._context)


class Direct:
    """One connection per cluster, reopened only after it was closed."""

    def __init__(self, port: int, context: Callable[[int], ssl.SSLContext]) -> None:
        self._port = port
        self._context = context
        self._open: dict[int, LoadConnection] = {}

    async def send(self, number: int, request: bytes) -> RawResponse:
        connection = self._open.get(number)
        if connection is None or connection.is_closed:
            connection = await connections.open_connection(self._port, self._context(number))
            self._open[number] = connection
        return await connection.call(request)

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()


async def send_advertisements(
    strategy: ConnectionStrategy, messages: Sequence[bytes], bench: str
) -> None:
    """Sends one advertisement per cluster as fast as possible."""
    waiting = iter(range(len(messages)))

    async def some() -> None:
        for number in waiting:
            if number % 100 == 0:
                progress.show_progress(
                    f"{bench}: {number:,} of {len(messages):,} clusters have joined"
                )
            await send_advertisement(strategy, number, messages[number])

    async with asyncio.TaskGroup() as group:
        for _ in range(_PARALLEL_CLUSTERS):
            group.create_task(some())


async def send_advertisement(strategy: ConnectionStrategy, number: int, message: bytes) -> None:
    """Sends one advertisement; raises unless it is accepted."""
    answer = await strategy.send(number, message)
    if answer.status != _OK:
        raise UnexpectedAnswer(f"advertisement failed with {answer.status}: {answer.body!r}")
