"""Load generators, on a minimal HTTP/1.1 client with little overhead of its own.

The client supports only responses of the broker: a status, a Content-Length, a body. Each connection has
one request in flight at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from kubelend.core.errors import BrokerUnreachable, Unavailable, UnexpectedResponse
from kubelend.envtest import waiting
from kubelend.transports import tls

RESPONSE_TIMEOUT = 30.0 * waiting.FACTOR
"""Timeout of a response in seconds."""

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"


class RawResponse(NamedTuple):
    """Status and body of a response."""

    status: int
    body: bytes


def parse_response(received: bytes) -> RawResponse | None:
    """Parses a response; returns None while it is incomplete."""
    end = received.find(_HEAD_END)
    if end < 0:
        return None
    length = _CONTENT_LENGTH.search(received, 0, end + 2)
    if length is None or not received.startswith(b"HTTP/1.1 "):
        raise UnexpectedResponse(f"response not supported by this client: {received[:80]!r}")
    start = end + len(_HEAD_END)
    whole = start + int(length[1])
    if len(received) < whole:
        return None
    return RawResponse(int(received[9:12]), received[start:whole])


class LoadConnection(asyncio.Protocol):
    """One connection; calls `on_response` and `on_lost`."""

    def __init__(self) -> None:
        self.on_response: Callable[[RawResponse], None] = _ignore
        self.on_lost: Callable[[Exception], None] = _ignore
        self._transport: asyncio.Transport | None = None
        self._received = b""

    def send(self, request: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            self.on_lost(_connection_lost(None))
            return
        self._transport.write(request)

    async def call(self, request: bytes) -> RawResponse:
        """Sends a request and waits for the response."""
        answered: asyncio.Future[RawResponse] = asyncio.get_running_loop().create_future()

        def lost(problem: Exception) -> None:
            if not answered.done():
                answered.set_exception(problem)

        self.on_response, self.on_lost = answered.set_result, lost
        self.send(request)
        async with asyncio.timeout(RESPONSE_TIMEOUT):
            return await answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received = self._received + data if self._received else data
        answer = parse_response(self._received)
        if answer is not None:
            self._received = b""
            self.on_response(answer)

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        self.on_lost(_connection_lost(problem))


async def open_connection(port: int, context: ssl.SSLContext) -> LoadConnection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        LoadConnection, "127.0.0.1", port, ssl=context, server_hostname="localhost"
    )
    return connection


def _ignore(_: object) -> None:
    """Default callback."""


def _connection_lost(problem: Exception | None) -> BrokerUnreachable:
    return BrokerUnreachable(f"the broker closed a connection: {problem or 'no reason given'}")


_OK = 200
_PARALLEL_CLUSTERS = 32
"""Number of clusters that send in parallel."""
_MOST_CONNECTIONS = 128
"""Maximum of requests in flight, which is that of a proxy's connections."""


class LoadConnections:
    """Connections of many clusters: one for each, or those of a proxy that terminates TLS, for all of them.

    Free connections are used again; a new one is opened if there is none.
    """

    def __init__(
        self, port: int, context: Callable[[int], ssl.SSLContext], *, shared: bool = False
    ) -> None:
        """`context` is called with the number of the cluster, or with 0 if connections are shared."""
        self._port = port
        self._context = context
        self._shared = shared
        self._slots = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._free: defaultdict[int, list[LoadConnection]] = defaultdict(list)

    async def send(self, number: int, request: bytes) -> RawResponse:
        """Sends a request of the cluster with this number and waits for the response."""
        key = 0 if self._shared else number
        async with self._slots:
            free = self._free[key]
            connection = free.pop() if free else None
            if connection is None or connection.is_closed:
                connection = await open_connection(self._port, self._context(key))
            answer = await connection.call(request)
            free.append(connection)
            return answer

    def close(self) -> None:
        for connection in itertools.chain(*self._free.values()):
            connection.close()


async def send_advertisements(
    pool: LoadConnections, messages: Sequence[bytes], progress: Callable[[str], None]
) -> None:
    """Sends one advertisement per cluster as fast as possible."""
    left = iter(range(len(messages)))

    async def some() -> None:
        for number in left:
            if number % 100 == 0:
                progress(f"{number:,} of {len(messages):,} clusters have joined")
            await send_advertisement(pool, number, messages[number])

    async with asyncio.TaskGroup() as group:
        for _ in range(_PARALLEL_CLUSTERS):
            group.create_task(some())


async def send_advertisement(pool: LoadConnections, number: int, message: bytes) -> None:
    """Sends one advertisement; raises unless it is accepted."""
    answer = await pool.send(number, message)
    if answer.status != _OK:
        raise UnexpectedResponse(f"advertisement failed with {answer.status}: {answer.body!r}")


class LoadResult:
    """Latencies and responses of one kind of request."""

    def __init__(self, expected: int) -> None:
        """`expected` is the status of a response."""
        self.expected = expected
        self.latencies: list[float] = []
        self.responses: list[bytes] = []
        self.rates: list[float] = []
        """Responses per second, of each time slice."""


async def open_connections(port: int, certificates: Sequence[Path]) -> list[LoadConnection]:
    """Opens one connection per certificate."""
    return [await open_connection(port, tls.client_context(path)) for path in certificates]


async def send_all(
    opened: Sequence[LoadConnection], messages: Sequence[bytes], result: LoadResult
) -> None:
    """Sends all messages; each connection sends the next one when it has its response (closed loop)."""
    left, began = iter(messages), time.perf_counter()
    await _ClosedLoop(result, math.inf).run(opened, lambda _: next(left, None))
    result.rates.append(len(messages) / (time.perf_counter() - began))


async def send_for(
    opened: Sequence[LoadConnection],
    request: Callable[[int], bytes],
    seconds: float,
    result: LoadResult,
) -> None:
    """Sends requests for a time slice. `request` is called with the number of the connection.

    Responses after the end do not count for the rate.
    """
    before = len(result.latencies)
    await _ClosedLoop(result, time.perf_counter() + seconds).run(opened, request)
    result.rates.append((len(result.latencies) - before) / seconds)


class _ClosedLoop:
    """One request in flight on each connection, until `end` or until there are no more requests."""

    def __init__(self, result: LoadResult, end: float) -> None:
        self._result = result
        self._end = end
        self._busy = 0
        self._done = asyncio.get_running_loop().create_future()

    async def run(
        self, opened: Sequence[LoadConnection], request: Callable[[int], bytes | None]
    ) -> None:
        """Returns when all connections are idle; fails if no response arrives for a while."""
        self._busy = len(opened)
        for number, connection in enumerate(opened):
            self._drive(connection, partial(request, number))
        while not self._done.done():
            before = len(self._result.responses)
            await asyncio.wait([self._done], timeout=RESPONSE_TIMEOUT)
            if not self._done.done() and len(self._result.responses) == before:
                raise Unavailable(f"the broker did not respond within {RESPONSE_TIMEOUT:g} s")
        self._done.result()

    def _drive(self, connection: LoadConnection, request: Callable[[], bytes | None]) -> None:
        result, sent = self._result, 0.0

        def send_next() -> None:
            nonlocal sent
            message = request()
            if message is None:
                self._on_idle()
                return
            sent = time.perf_counter()
            connection.send(message)

        def answered(answer: RawResponse) -> None:
            now = time.perf_counter()
            if answer.status != result.expected:
                self._fail(UnexpectedResponse(f"{answer.status}: {answer.body.decode()}"))
                return
            result.responses.append(answer.body)
            if now >= self._end:
                self._on_idle()
                return
            result.latencies.append(now - sent)
            send_next()

        connection.on_response, connection.on_lost = answered, self._fail
        send_next()

    def _on_idle(self) -> None:
        self._busy -= 1
        if not self._busy and not self._done.done():
            self._done.set_result(None)

    def _fail(self, problem: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(problem)
