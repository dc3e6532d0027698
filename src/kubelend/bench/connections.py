"""A minimal HTTP/1.1 client with little overhead of its own.

It supports only responses of our broker: a status, a Content-Length, a body. Each connection has one request
in flight at a time.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from typing import NamedTuple, cast

from kubelend.core.errors import BrokerUnreachable, UnexpectedAnswer

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
    """One connection; calls `on_answer` and `on_lost`."""

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
