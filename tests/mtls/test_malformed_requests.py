"""Hostile requests: each gets a clear no or a closed connection, and costs others nothing."""

import asyncio
import contextlib
import gzip
import json
import ssl
from typing import Any

import pytest
import pytest_asyncio

import brokers
import make
import waiting
from kubelend.stores.memory import MemoryStore
from raw_connections import CLOSE, GET, POST, connected, end_of, others_are_served, transport_of
from waiting import PATIENCE

TIMES: dict[str, Any] = {"read_timeout": make.SECOND / 2, "idle_timeout": make.SECOND / 2}
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
REQUEST = b'{"requestedResources":{"cpu":"1","memory":"1Gi"},'

shared_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(certificates):
    """One broker for all of them: none of these requests leaves a trace."""
    async with brokers.running(certificates, **TIMES) as broker:
        yield broker


def body(content, *headers):
    lines = b"".join(header + b"\r\n" for header in headers)
    length = b"Content-Length: %d" % len(content)
    return POST + lines + length + CLOSE + content


async def answers_to(broker, sent):
    """All that comes back while another client is served."""
    async with connected(broker.cluster("hostile")) as (reader, writer):
        sending = asyncio.create_task(send(writer, sent))
        await others_are_served(broker)
        found = await end_of(reader)
        sending.cancel()
        await asyncio.wait([sending])
    return found


async def send(writer, content):
    try:
        writer.write(content)
        await writer.drain()
    except (ConnectionError, ssl.SSLError):
        return  # the server has closed it already


def target(text):
    return GET.replace(b"/api/v1/version", text).replace(b"\r\n\r\n", CLOSE)


def status_of(answer):
    return int(answer.split(b" ")[1]) if answer else None


def chunked_bomb():
    bomb = gzip.compress(b" " * 20_000_000, 1)
    head = POST + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n" % len(bomb) + bomb + b"\r\n0\r\n\r\n"


BOMB = chunked_bomb()


@pytest.mark.parametrize(
    "sent, status",
    [
        # headers
        pytest.param(GET[:-2] + b"X-Many: y\r\n" * 1000 + b"\r\n", 400, id="many headers"),
        pytest.param(GET[:-2] + b"x" * 20_000 + b": y\r\n\r\n", 400, id="long name of a header"),
        pytest.param(GET[:-2] + b"X: " + b"y" * 20_000 + b"\r\n\r\n", 400, id="long header"),
        pytest.param(GET[:-2] + b"X: " + b"y" * 2_000_000, 400, id="header without end"),
        pytest.param(GET[:-2] + (b"X: " + b"y" * 9000 + b"\r\n") * 500, 400, id="MBs of headers"),
        pytest.param(GET[:-2] + b"X: a\x00b\r\n\r\n", 400, id="zero"),
        pytest.param(GET[:-2] + b"X: a\r\n b\r\n\r\n", 400, id="folded"),
        pytest.param(GET[:-2] + b"X: a\rContent-Length: 5\r\n\r\n", 400, id="carriage return"),
        pytest.param(GET[:-2] + b"Host: elsewhere\r\n\r\n", 400, id="two hosts"),
        pytest.param(GET[:-2] + b"No colon here\r\n\r\n", 400, id="header without a colon"),
        # targets
        pytest.param(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 400, id="long path"),
        pytest.param(target(b"/api/v1/clusters/%ff"), 403, id="no UTF-8 in a path"),
        pytest.param(target(b"/api/v1/clusters/%zz"), 403, id="no hexadecimal"),
        pytest.param(target(b"/api/v1/clusters/%"), 403, id="percent alone"),
        pytest.param(target(b"/api/v1/clusters/%00"), 404, id="zero in a path"),
        pytest.param(target(b"/api/v1/reservations/%2e%2e%2fversion"), 404, id="dots"),
        pytest.param(target(b"/api/v1/reservations/../version"), 404, id="up"),
        pytest.param(target(b"//api/v1/version"), 404, id="two slashes"),
        pytest.param(target(b"/api/v1/version/"), 404, id="slash at the end"),
        pytest.param(target(b"/api/v1/VERSION"), 404, id="capitals"),
        pytest.param(target(b"/api/v1/version?limit=%ff&x=%zz"), 200, id="odd query"),
        pytest.param(target(b"/api/v1/reservations?limit=%ff"), 400, id="odd value"),
        pytest.param(target(b"https://localhost/api/v1/version"), 200, id="absolute"),
        pytest.param(target(b"*"), 400, id="asterisk"),
        # other protocols
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), 400, id="HTTP/2"),
        pytest.param(bytes(range(256)) * 1000, 400, id="garbage"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400, id="TLS"),
        pytest.param(b"G@T / HTTP/1.1\r\nHost: a\r\n\r\n", 400, id="odd method"),
        pytest.param(b"X" * 20_000 + b" / HTTP/1.1\r\nHost: a\r\n\r\n", 400, id="long method"),
        pytest.param(b"GET /api/v1/version HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"CONNECT a:443 HTTP/1.1\r\nHost: a" + CLOSE, 404, id="tunnel"),
        pytest.param(GET.replace(b"GET", b"TRACE"), 405, id="trace"),
        pytest.param(b"GET /api/v1/version HTTP/1.0\r\n\r\n", 200, id="HTTP/1.0"),
        pytest.param(b"\r\n" * 10_000 + GET, 200, id="empty lines first"),
        pytest.param(
            GET[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
            200,
            id="upgrade to HTTP/2",
        ),
        # encodings of a body
        pytest.param(body(b"{}", b"Content-Encoding: br"), 400, id="br"),
        pytest.param(body(b"{}", b"Content-Encoding: zstd"), 400, id="zstd"),
        pytest.param(body(b"{}", b"Content-Encoding: compress"), 400, id="compress"),
        pytest.param(body(b"{}", b"Content-Encoding: gzip, gzip"), 400, id="packed twice"),
        pytest.param(body(b"{}{}", b"Content-Encoding: gzip"), 400, id="not packed"),
        pytest.param(body(b"{}{}", b"Content-Encoding: deflate"), 400, id="not deflated"),
        pytest.param(BOMB, 413, id="bomb in chunks, measured unpacked"),
        # bodies without end; of the last two nothing is answered if the connection is closed first
        pytest.param(CHUNKED + (b"10\r\n" + b" " * 16 + b"\r\n") * 20_000, 413, id="small chunks"),
        pytest.param(CHUNKED + b"f" * 18 + b"\r\n", 400, id="astronomic chunk"),
        pytest.param(CHUNKED + b"-5\r\nabc", 400, id="negative chunk"),
        pytest.param(CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 100_000, 400, id="trailers"),
        pytest.param(POST + b"Content-Length: %d\r\n\r\n{}" % 10**12, 413, id="terabyte to come"),
        pytest.param(CHUNKED + b"5;" + b"x" * 1_000_000, None, id="chunk's extension"),
        pytest.param(CHUNKED + b"0" * 1_000_000, None, id="long size of a chunk"),
    ],
)
@shared_loop
async def test_hostile_request_is_answered_or_cut_off_and_others_are_served(
    shared, log, sent, status
):
    found = status_of(await answers_to(shared, sent))
    assert found == status or (status is None and found in (400, 408))
    assert "exception" not in log.text


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", id="length twice"),
        pytest.param(POST + b"Content-Length: 2, 2\r\n\r\n{}", id="list of lengths"),
        pytest.param(POST + b"Content-Length: +2\r\n\r\n{}", id="signed length"),
        pytest.param(POST + b"Content-Length: -5\r\n\r\n", id="negative length"),
        pytest.param(POST + b"Content-Length: 0x2\r\n\r\n{}", id="length in hexadecimal"),
        pytest.param(POST + b"Content-Length : 2\r\n\r\n{}", id="space before the colon"),
        pytest.param(POST + b"Content-Length: 2\x0b\r\n\r\n{}", id="odd space after a length"),
        pytest.param(POST + b"Content-Length: %d\r\n\r\n{}" % 10**30, id="astronomic length"),
        pytest.param(
            POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", id="chunked twice"
        ),
        pytest.param(POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", id="like chunked"),
        pytest.param(POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", id="chunked, space"),
        pytest.param(
            POST + b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}", id="identity"
        ),
        pytest.param(
            POST.replace(b"1.1\r", b"1.0\r") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            id="chunked in HTTP/1.0",
        ),
        pytest.param(CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n", id="both lengths"),
        pytest.param(CHUNKED + b"zz\r\n{}\r\n", id="no chunk"),
        pytest.param(GET.replace(b"\r\n", b"\n"), id="bare line feeds"),
    ],
)
@shared_loop
async def test_request_that_a_proxy_could_divide_otherwise_is_refused(shared, log, sent):
    """What is smuggled in as a second request is never answered."""
    found = await answers_to(shared, sent + GET)
    assert status_of(found) == 400
    assert found.count(b"HTTP/1.") == 1
    assert b'"code":"InvalidInput"' in found
    assert "exception" not in log.text


@shared_loop
async def test_upgrade_that_is_not_wanted_leaves_no_room_for_what_follows(shared, log):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    found = await answers_to(shared, GET[:-2] + upgrade + b"\x81\x85junkx" * 100_000)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert found.count(b"HTTP/1.") <= 2
    assert b" 5" not in found.replace(b"HTTP/1.1 ", b" ").split(b"\r\n")[0]
    assert "exception" not in log.text


@shared_loop
async def test_stream_for_a_client_of_http_1_0_is_not_divided(shared):
    """It knows no chunks: the stream lasts as long as the connection."""
    async with connected(shared.cluster("old")) as (reader, writer):
        writer.write(b"GET /api/v1/instructions/stream HTTP/1.0\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        assert head.startswith(b"HTTP/1.0 200 ")
        assert b"chunked" not in head.lower()
        assert (await reader.readline()) == b"event: reset\n"


async def test_flood_of_requests_in_one_go_is_answered_in_turn_with_others(start):
    broker = await start(**TIMES, rate_limit=10, rate_burst=50)
    async with connected(broker.cluster("loud")) as (reader, writer):
        sending = asyncio.create_task(send(writer, GET * 5000))
        for number in range(20):
            assert (await broker.cluster(f"other-{number}").get("version")).status == 200
        found = await end_of(reader)
        sending.cancel()
        await asyncio.wait([sending])
    assert found.count(b"HTTP/1.1 200 ") < 200
    assert found.count(b"HTTP/1.1 429 ") > 4000


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"[" * 100_000, id="lists"),
        pytest.param(b'{"a":' * 40_000, id="objects"),
        pytest.param(b'{"requestedResources":' + b"[" * 100_000, id="where an object should be"),
        pytest.param(
            b'{"nothing":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="in an unknown field"
        ),
        pytest.param(b'{"priority":' + b"9" * 200_000 + b"}", id="long number"),
        pytest.param(b'{"priority":1e999999999}', id="large number"),
        pytest.param(b'{"priority":NaN}', id="no number"),
        pytest.param(
            REQUEST.replace(b'"1"', b'"' + b"9" * 200_000 + b'"') + b'"a":1}', id="digits"
        ),
        pytest.param(REQUEST.replace(b'"1"', b'"1e999999999"') + b'"a":1}', id="exponent"),
        pytest.param(REQUEST + b'"policy":"' + b"x" * 200_000 + b'"}', id="long text"),
        pytest.param(b'{"policy":"\\ud800"}', id="half a character"),
        pytest.param(b'{"policy":"\xff\xfe"}', id="no UTF-8"),
    ],
)
@shared_loop
async def test_deep_or_huge_values_are_refused(shared, log, sent):
    found = await answers_to(shared, body(sent))
    assert status_of(found) == 400
    assert len(found) < 2000
    assert json.loads(found.partition(b"\r\n\r\n")[2])["code"].startswith("Invalid")
    assert "exception" not in log.text


@shared_loop
async def test_body_where_none_is_read_holds_the_connection_up_for_a_moment_only(shared, log):
    endless = GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b"x" * 4096
    found = await answers_to(shared, endless)
    assert found.count(b"HTTP/1.1 200 ") == 1
    assert "exception" not in log.text


def encoded(kind):
    return POST + b"Content-Encoding: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % kind


PIECE = b"10000\r\n" + b" " * 2**16 + b"\r\n"


@pytest.mark.parametrize(
    "head",
    [POST + b"Content-Length: %d\r\n\r\n" % 2**40, CHUNKED],
    ids=["length", "chunks"],
)
async def test_rest_of_a_body_that_is_too_large_is_not_read(start, head):
    broker = await start()
    async with connected(broker.cluster("loud")) as (reader, writer):
        writer.write(head)
        sent, answer = 0, asyncio.create_task(end_of(reader))
        with contextlib.suppress(ConnectionError):
            while sent < 500 * len(PIECE):
                writer.write(PIECE)
                await writer.drain()
                sent += len(PIECE)
        assert (await answer).startswith(b"HTTP/1.1 413 ")
    assert sent < 100 * len(PIECE)


@pytest.mark.parametrize("status, method", [(413, b"POST"), (405, b"PATCH")])
@shared_loop
async def test_broken_rest_of_a_body_that_was_answered_is_not_logged(shared, log, status, method):
    bomb = gzip.compress(b" " * 30_000_000)[:20_000]
    head = encoded(b"gzip").replace(b"POST", method)
    async with connected(shared.cluster("hostile")) as (reader, writer):
        writer.write(head + b"%x\r\n" % len(bomb) + bomb + b"\r\n")
        async with asyncio.timeout(PATIENCE):
            assert status_of(await reader.read(1000)) == status
        writer.write(PIECE)
        assert await end_of(reader) == b""
    assert "exception" not in log.text


async def test_large_answers_that_are_not_read_are_let_go_of(start):
    """More than all buffers hold, and the client asks for nothing else."""
    store, count = MemoryStore(), 600
    store.commit(
        [
            make.cluster("a", heavy(1000)),
            *(make.held(n, make.request(heavy(1))) for n in range(count)),
        ],
        count,
    )
    broker = await start(idle_timeout=make.SECOND, open_store=brokers.reopening(store))
    for path in (b"instructions/stream", b"reservations?limit=1000"):
        async with connected(broker.cluster("a")) as (_, writer):
            transport_of(writer).pause_reading()
            writer.write(GET.replace(b"version", path))
            await waiting.until(lambda: broker.metric("kubelend_open_connections") == 1)
            await others_are_served(broker)
            await waiting.until(lambda: broker.metric("kubelend_open_connections") == 0)
    assert len(broker.service.streams) == 0


def heavy(amount):
    """Resources whose names alone fill ten kilobytes."""
    names = [f"{number:03d}{'x' * 240}.com/{'y' * 60}" for number in range(30)]
    extended = ",".join(f"{name}={amount}" for name in names)
    return f"cpu={amount}m,memory={amount}Mi,{extended}"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="before it spoke"),
        pytest.param(POST[:20], id="within the header"),
        pytest.param(POST + b"Content-Length: 100\r\n\r\n{", id="within the body"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", id="within a chunk"),
        pytest.param(GET * 50, id="before the answers"),
    ],
)
@shared_loop
async def test_client_that_goes_away_leaves_no_trace(shared, log, sent):
    async with connected(shared.cluster("slow")) as (_, writer):
        writer.write(sent)
        await writer.drain()
        transport_of(writer).abort()
    await others_are_served(shared)
    assert "exception" not in log.text
    assert log.lines("Request failed") == []
