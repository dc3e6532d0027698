"""Load generators, on a minimal HTTP/1.1 client with little overhead of its own.

The client supports only responses of the broker: a status, a Content-Length, a body. Each connection has
one request in flight at a time.
"""

from __future__ import annotations

import asyncio
import gc
import re
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import uvloop

from kubelend.bench import fixtures, measure
from kubelend.core.errors import BrokerUnreachable, UnexpectedAnswer
from kubelend.transports import tls

RESPONSE_TIMEOUT = 30.0
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
        raise UnexpectedAnswer(f"response not supported by this client: {received[:80]!r}")
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
        return await open_connection(self._port, self._context)


class Direct:
    """One connection per cluster, reopened only after it was closed."""

    def __init__(self, port: int, context: Callable[[int], ssl.SSLContext]) -> None:
        self._port = port
        self._context = context
        self._open: dict[int, LoadConnection] = {}

    async def send(self, number: int, request: bytes) -> RawResponse:
        connection = self._open.get(number)
        if connection is None or connection.is_closed:
            connection = await open_connection(self._port, self._context(number))
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
                measure.show_progress(
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


_CREATED = 201


class ReservationLoad:
    """Responses and latencies of a run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.latencies: list[float] = []
        self.responses: list[bytes] = []
        """Includes those of the warm-up."""

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds


async def send_reservations(port: int, certificates: Sequence[Path], count: int) -> ReservationLoad:
    """Opens a connection per certificate; each sends the next request when it is free."""
    opened = [await open_connection(port, tls.client_context(path)) for path in certificates]
    wanted = fixtures.tiny_requests(len(opened) + count)
    messages = [
        fixtures.reservation_requests(one, "bench")(number) for number, one in enumerate(wanted)
    ]
    # The first responses of a process are slow: they count for the audit only.
    warm_up = await _send_all(opened, messages[: len(opened)])
    load = await _send_all(opened, messages[len(opened) :])
    load.responses += warm_up.responses
    for connection in opened:
        connection.close()
    return load


async def _send_all(opened: Sequence[LoadConnection], messages: Sequence[bytes]) -> ReservationLoad:
    load, waiting, begin = ReservationLoad(), iter(messages), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for connection in opened:
            group.create_task(_send_on_connection(connection, waiting, load))
    load.seconds = time.perf_counter() - begin
    return load


async def _send_on_connection(
    connection: LoadConnection, waiting: Iterator[bytes], load: ReservationLoad
) -> None:
    for message in waiting:
        sent = time.perf_counter()
        answer = await connection.call(message)
        if answer.status != _CREATED:
            raise UnexpectedAnswer(f"{answer.status}: {answer.body.decode()}")
        load.latencies.append(time.perf_counter() - sent)
        load.responses.append(answer.body)


ResultT = TypeVar("ResultT")


def run_on_uvloop(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs a coroutine, with objects of earlier benchmarks excluded from garbage collection."""
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
