"""How a cluster holds on to its broker between two advertisements: the one thing that benchmarks vary."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from kubelend.bench import connections
from kubelend.bench.connections import Answer, Connection

Contexts = Callable[[int], ssl.SSLContext]
"""The TLS context of the cluster with this number."""


class Strategy(Protocol):
    """Sends for many clusters, each over connections of its own."""

    async def send(self, number: int, request: bytes) -> Answer:
        """Send for the cluster with this number, and wait for the answer."""

    def close(self) -> None:
        """Close what is open."""


class Kind(StrEnum):
    """The strategies by name."""

    KEPT = "kept"  # the connection stays open: memory at the broker, no handshakes
    RESUMED = "resumed"  # a connection each time, resumed if the broker allows it: the opposite


class Kept:
    """Each cluster keeps its connection, and makes a new one only when it was closed."""

    def __init__(self, port: int, contexts: Contexts) -> None:
        self._port = port
        self._contexts = contexts
        self._open: dict[int, Connection] = {}

    async def send(self, number: int, request: bytes) -> Answer:
        connection = self._open.get(number)
        if connection is None or connection.is_closed:
            connection = await connections.connect(self._port, self._contexts(number))
            self._open[number] = connection
        return await connection.call(request)

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()


class Resumed:
    """A connection for each call, with the TLS session of the one before if the broker gave any."""

    def __init__(self, port: int, contexts: Contexts) -> None:
        self._port = port
        self._contexts = contexts
        self._resuming: dict[int, _ResumingContext] = {}

    async def send(self, number: int, request: bytes) -> Answer:
        context = self._resuming.get(number)
        if context is None:
            context = self._resuming[number] = _ResumingContext(ssl.PROTOCOL_TLS_CLIENT)
            context.inner = self._contexts(number)
        connection = await connections.connect(self._port, context)
        answer = await connection.call(request)
        context.session = connection.session
        connection.close()
        return answer

    def close(self) -> None:
        """Nothing stays open."""


STRATEGIES: dict[Kind, Callable[[int, Contexts], Strategy]] = {
    Kind.KEPT: Kept,
    Kind.RESUMED: Resumed,
}


class _ResumingContext(ssl.SSLContext):
    """Offers a session with each handshake, which event loops have no parameter for."""

    inner: ssl.SSLContext
    session: ssl.SSLSession | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return self.inner.wrap_bio(
            incoming, outgoing, server_side, server_hostname, session or self.session
        )
