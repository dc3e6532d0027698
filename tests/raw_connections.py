"""Raw TLS and TCP connections to a broker, for what no HTTP client would send.

async with raw_connections.connected(broker.cluster("slow")) as (reader, writer):
    writer.write(raw_connections.GET[:30])
    assert await raw_connections.end_of(reader) == b""
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import cast

from brokers import Callers
from callers import Caller
from waiting import PATIENCE

GET = b"GET /api/v1/version HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /api/v1/reservations HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"\r\nConnection: close\r\n\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(caller: Caller, address: str = "127.0.0.1") -> AsyncIterator[Streams]:
    """A connection of a known caller, from this address."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1",
        caller.port,
        ssl=caller.context,
        server_hostname="localhost",
        local_addr=(address, 0),
    )
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()


def transport_of(writer: asyncio.StreamWriter) -> asyncio.Transport:
    """To stop reading, and to go away without a word."""
    return cast("asyncio.Transport", writer.transport)


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the other side closes, however it does.

    Piece by piece: a reset behind the answer makes a reader forget what it has not handed over.
    """
    pieces = []
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            while piece := await reader.read(2**16):
                pieces.append(piece)
    return b"".join(pieces)


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """One answer with a body of JSON without braces inside."""
    async with asyncio.timeout(PATIENCE):
        return await reader.readuntil(b"}")


async def others_are_served(broker: Callers) -> None:
    """On a connection of their own: a kept one may just have been idle for too long."""
    other = broker.cluster("other")
    answer = await other.get("version")
    assert answer.status == 200, answer
    await other.hang_up()


@contextlib.contextmanager
def silent(port: int, count: int, address: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """TCP connections from this address that say nothing."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            found = socket.create_connection(("127.0.0.1", port), PATIENCE, (address, 0))
            opened.append(stack.enter_context(contextlib.closing(found)))
        yield opened


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it; what it said before is dropped, and nothing is waited for."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
