"""Answers with a JSON body, as they go over a socket."""

import asyncio
import json
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime

import pytest
from aiohttp import web

import make
from kubelend.api.request import JsonResponse
from kubelend.kits import clock
from kubelend.transports import server
from kubelend.transports.server import ServerLimits
from waiting import PATIENCE

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = {"name": "ü", "amount": 3}


@asynccontextmanager
async def connected(*, status: int = 200, closes: bool = False):
    """To a listener that gives an answer of this kind."""

    async def handler(_: web.BaseRequest) -> web.StreamResponse:
        answer = JsonResponse(BODY, status)
        if closes:
            answer.force_close()
        return answer

    async with server.serve_http(handler, "127.0.0.1", 0, ServerLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)


def fields(head: bytes) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in head.decode("ascii").strip().split("\r\n")[1:])


async def test_head_says_what_follows_and_when_it_was_said():
    async with connected(status=201) as (reader, writer):
        asked = clock.utc_now()
        writer.write(GET)
        head = await head_of(reader)
        said = fields(head)
        assert head.startswith(b"HTTP/1.1 201 Created\r\n")
        assert said.keys() == {"Content-Type", "Content-Length", "Date", "Connection"}
        assert said["Content-Type"] == "application/json"
        assert json.loads(await reader.readexactly(int(said["Content-Length"]))) == BODY
        # Whole seconds, and perhaps the ones of a moment ago.
        assert asked - 2 * make.SECOND < parsedate_to_datetime(said["Date"]) <= clock.utc_now()


@pytest.mark.parametrize(
    "start, closes, said",
    [
        pytest.param(b"GET / HTTP/1.1\r\n", False, "keep-alive", id="as usual"),
        pytest.param(b"GET / HTTP/1.1\r\n", True, "close", id="handler closes"),
        pytest.param(b"GET / HTTP/1.1\r\nConnection: close\r\n", False, "close", id="client does"),
        pytest.param(b"GET / HTTP/1.0\r\n", False, "close", id="old client"),
        pytest.param(
            b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", False, "keep-alive", id="old, stays"
        ),
    ],
)
async def test_connection_stays_open_if_both_sides_want_it(start, closes, said):
    async with connected(closes=closes) as (reader, writer):
        writer.write(start + b"Host: x\r\n\r\n")
        head = fields(await head_of(reader))
        assert head["Connection"] == said
        await reader.readexactly(int(head["Content-Length"]))
        if said == "close":
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""


async def test_several_calls_on_one_connection_are_answered_in_turn():
    async with connected() as (reader, writer):
        writer.write(3 * GET)
        for _ in range(3):
            head = fields(await head_of(reader))
            assert json.loads(await reader.readexactly(int(head["Content-Length"]))) == BODY


async def test_who_asks_for_the_head_alone_gets_no_body():
    async with connected() as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert int(fields(await head_of(reader))["Content-Length"]) > 0
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
