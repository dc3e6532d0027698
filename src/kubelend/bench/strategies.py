"""Connection strategies: many clusters through a proxy's few connections, or each with its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol

from kubelend.bench import connections, progress
from kubelend.bench.connections import Answer, Connection
from kubelend.core.errors import UnexpectedAnswer

_OK = 200
_RAMP = 32
"""Number of clusters that send in parallel."""


class Strategy(Protocol):
    """Sends requests of many clusters."""

    async def send(self, number: int, request: bytes) -> Answer:
        """Sends a request of the cluster with this number and waits for the response."""

    def close(self) -> None:
        """Closes all connections."""


class Proxied:
    """A proxy that terminates TLS: uses any free connection, and opens a new one if there is none."""

    def __init__(self, port: int, context: ssl.SSLContext, most: int = 128) -> None:
        self._port = port
        self._context = context
        self._room = asyncio.Semaphore(most)
        self._free: list[Connection] = []

    async def send(self, number: int, request: bytes) -> Answer:  # noqa: ARG002 - the request contains the identity
        async with self._room:
            connection = await self._take()
            answer = await connection.call(request)
            self._free.append(connection)
            return answer

    def close(self) -> None:
        for connection in self._free:
            connection.close()

    async def _take(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed:
                return connection
        return await connections.connect(self._port, self._context)


class Direct:
    """One connection per cluster, reopened only after it was closed."""

    def __init__(self, port: int, context: Callable[[int], ssl.SSLContext]) -> None:
        self._port = port
        self._context = context
        self._open: dict[int, Connection] = {}

    async def send(self, number: int, request: bytes) -> Answer:
        connection = self._open.get(number)
        if connection is None or connection.is_closed:
            connection = await connections.connect(self._port, self._context(number))
            self._open[number] = connection
        return await connection.call(request)

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()


async def send_each(strategy: Strategy, messages: Sequence[bytes], bench: str) -> None:
    """Sends one advertisement per cluster as fast as possible."""
    waiting = iter(range(len(messages)))

    async def some() -> None:
        for number in waiting:
            if number % 100 == 0:
                progress.say(f"{bench}: {number:,} of {len(messages):,} clusters have joined")
            await send(strategy, number, messages[number])

    async with asyncio.TaskGroup() as group:
        for _ in range(_RAMP):
            group.create_task(some())


async def send(strategy: Strategy, number: int, message: bytes) -> None:
    """Sends one advertisement; raises unless it is accepted."""
    answer = await strategy.send(number, message)
    if answer.status != _OK:
        raise UnexpectedAnswer(f"advertisement failed with {answer.status}: {answer.body!r}")
