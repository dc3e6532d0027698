"""Calls that come all day from everyone are read together, and nobody else waits for them."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response

from kubelend.kits.ratelimit import CoalescingTimer
from kubelend.transports import server
from kubelend.transports.server import MAX_BUFFERED_BYTES, ReadBatching, ServerLimits
from waiting import PATIENCE

HOUR, SOON = 3600.0, 0.05

GET = b"GET /news HTTP/1.1\r\nHost: localhost\r\n\r\n"


def say(body: bytes) -> bytes:
    return b"POST /said HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


class Listener:
    def __init__(self, port: int) -> None:
        self.port = port

    @asynccontextmanager
    async def connected(self):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=8 * MAX_BUFFERED_BYTES
        )
        try:
            yield reader, writer
        finally:
            writer.close()


@asynccontextmanager
async def listening(seconds: float):
    async def echo(request: BaseRequest) -> Response:
        return Response(body=b"<" + await request.read() + b">")

    batching = ReadBatching(b"POST /said ", CoalescingTimer(seconds))
    limits = ServerLimits(body=4 * MAX_BUFFERED_BYTES, read_batching=batching)
    async with server.serve_http(echo, "127.0.0.1", 0, limits) as port:
        yield Listener(port)


async def body(reader: asyncio.StreamReader) -> bytes:
    text = await asyncio.wait_for(reader.readuntil(b">"), PATIENCE)
    return text[text.index(b"<") :]


async def is_silent(reader: asyncio.StreamReader) -> bool:
    """Asked after somebody else was answered who came later."""
    try:
        await asyncio.wait_for(reader.read(1), SOON)
    except TimeoutError:
        return True
    return False


async def test_one_that_comes_alone_is_answered_at_once():
    async with listening(HOUR) as listener, listener.connected() as (reader, writer):
        writer.write(say(b"one"))
        assert await body(reader) == b"<one>"


async def test_one_that_comes_soon_after_waits_and_others_do_not():
    async with (
        listening(HOUR) as listener,
        listener.connected() as (first, to_first),
        listener.connected() as (second, to_second),
        listener.connected() as (other, to_other),
    ):
        to_first.write(say(b"one"))
        assert await body(first) == b"<one>"
        to_second.write(say(b"two"))
        to_other.write(GET)
        assert await body(other) == b"<>"
        assert await is_silent(second)


async def test_what_waits_is_answered_before_the_listener_closes():
    async with listening(HOUR) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(say(b"one"))
        assert await body(reader) == b"<one>"
        writer.write(say(b"two"))
        assert await is_silent(reader)
    assert await body(reader) == b"<two>"
    writer.close()


async def test_what_comes_in_pieces_is_read_whole():
    async with listening(SOON) as listener, listener.connected() as (reader, writer):
        for text in (b"one", b"two", b"three"):
            for piece in (say(text)[:20], say(text)[20:-2], say(text)[-2:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            assert await body(reader) == b"<" + text + b">"


async def test_who_sends_much_is_read_at_once():
    async with listening(HOUR) as listener, listener.connected() as (reader, writer):
        writer.write(say(b"one"))
        assert await body(reader) == b"<one>"
        much = b"x" * (2 * MAX_BUFFERED_BYTES)
        writer.write(say(much))
        assert await body(reader) == b"<" + much + b">"


async def test_who_leaves_takes_nobody_along():
    async with listening(SOON) as listener, listener.connected() as (reader, writer):
        writer.write(say(b"one"))
        assert await body(reader) == b"<one>"
        async with listener.connected() as (_, leaving):
            leaving.write(say(b"gone"))
        writer.write(say(b"two"))
        assert await body(reader) == b"<two>"


@pytest.mark.parametrize("count", [2, 5])
async def test_several_at_once_on_one_connection_are_all_answered_in_order(count):
    async with listening(SOON) as listener, listener.connected() as (reader, writer):
        texts = [b"%d" % number for number in range(count)]
        writer.write(b"".join(map(say, texts)))
        assert [await body(reader) for _ in texts] == [b"<" + text + b">" for text in texts]
