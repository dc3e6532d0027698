"""Clients that stall, stop or babble are let go of in time, and nobody else notices them."""

import asyncio
import contextlib
import socket
import time

import pytest

import make
import waiting
from bare import CLOSE, GET, POST, connected, end_of, others_are_served, transport_of
from waiting import PATIENCE

QUICK = make.SECOND / 5

pytestmark = pytest.mark.broker(
    read_timeout=QUICK, handshake_timeout=make.HOUR, idle_timeout=make.HOUR
)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(GET[:1], id="one byte"),
        pytest.param(GET[:30], id="half a header"),
        pytest.param(GET[:-2], id="all but the last line"),
    ],
)
async def test_header_that_does_not_arrive_ends_the_connection(broker, sent):
    async with connected(broker.cluster("slow")) as (reader, writer):
        writer.write(sent)
        began = time.monotonic()
        await others_are_served(broker)
        assert await end_of(reader) == b""
        assert time.monotonic() - began > QUICK.total_seconds() / 2


async def test_second_header_that_does_not_arrive_ends_the_connection_too(broker):
    async with connected(broker.cluster("slow")) as (reader, writer):
        writer.write(GET)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        writer.write(GET[:30])
        assert await end_of(reader) == b""


async def test_header_that_drips_ends_the_connection(broker):
    """Each byte is in time, the whole is not."""
    async with connected(broker.cluster("slow")) as (reader, writer):
        dripping = asyncio.create_task(drip(writer, GET[:-2] + b"X: " + b"x" * 1000))
        assert await end_of(reader) == b""
        dripping.cancel()
        await asyncio.wait([dripping])


async def test_body_that_does_not_arrive_is_answered_and_ends_the_connection(broker):
    async with connected(broker.cluster("slow")) as (reader, writer):
        writer.write(POST + b"Content-Length: 100\r\n\r\n" + b'{"requested')
        await others_are_served(broker)
        answer = await end_of(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"TooSlow"' in answer
    assert b'"hint":"send the body without pauses"' in answer


async def test_body_that_drips_is_answered_and_ends_the_connection(broker):
    async with connected(broker.cluster("slow")) as (reader, writer):
        writer.write(POST + b"Content-Length: 1000\r\n\r\n")
        dripping = asyncio.create_task(drip(writer, b" " * 1000))
        answer = await end_of(reader)
        dripping.cancel()
        await asyncio.wait([dripping])
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_handshake_that_stalls_ends_the_connection(start):
    broker = await start(handshake_timeout=QUICK, read_timeout=make.HOUR, idle_timeout=make.HOUR)
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    writer.write(b"\x16\x03\x01")
    await others_are_served(broker)
    await end_of(reader)
    writer.close()


async def test_connection_that_never_speaks_ends_after_the_time_of_an_idle_one(start):
    broker = await start(idle_timeout=QUICK)
    async with connected(broker.cluster("slow")) as (reader, _):
        await others_are_served(broker)
        assert await end_of(reader) == b""


async def test_idle_connection_ends_after_its_time_and_not_before(start):
    broker = await start(idle_timeout=3 * QUICK)
    async with connected(broker.cluster("slow")) as (reader, writer):
        for _ in range(4):
            writer.write(GET)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(QUICK.total_seconds())
        assert await end_of(reader) == b""


async def test_call_that_takes_long_is_not_cut_off_by_what_limits_clients(start):
    """A stream lasts, whatever the timeouts."""
    broker = await start(read_timeout=QUICK, idle_timeout=QUICK)
    a, r = broker.cluster("a"), broker.cluster("r")
    async with a.stream() as stream:
        await stream.event()
        await asyncio.sleep(2 * QUICK.total_seconds())
        await a.advertise()
        made = await r.reserve()
        assert (await stream.event()).told == ("provider", "Hold", made["id"])


async def test_client_that_does_not_read_its_answers_is_let_go_of(start):
    """More than all buffers hold: what cannot be sent must not be kept for ever."""
    broker = await start(idle_timeout=QUICK)
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise("64", "64Gi")
    await asyncio.gather(*(r.reserve("1m", "1Mi") for _ in range(200)))
    await a.hang_up()
    whole = len((await r.get("reservations", limit="200")).content)
    await r.hang_up()
    async with connected(a) as (reader, writer):
        transport_of(writer).pause_reading()
        writer.write(GET.replace(b"version", b"reservations?limit=200") * 200)
        await waiting.until(lambda: len(connections()) == 1)
        await others_are_served(broker)
        await waiting.until(lambda: not connections())
        transport_of(writer).resume_reading()
        assert len(await end_of(reader)) < 100 * whole


def connections():
    """What the server has running for each connection."""
    return [task for task in asyncio.all_tasks() if "RequestHandler.start" in repr(task)]


async def test_hundred_stalled_clients_keep_nobody_waiting(broker):
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(100):
            reader, writer = await stack.enter_async_context(connected(broker.cluster("slow")))
            writer.write(POST)
            readers.append(reader)
        await others_are_served(broker)
        for reader in readers:
            assert await end_of(reader) == b""


# -- those that go away, and those that babble


async def test_client_that_does_not_wait_for_its_answer_is_counted_as_gone(start):
    """Its body is still to come: until then its call is open."""
    broker = await start()
    async with connected(broker.cluster("hasty")) as (_, writer):
        writer.write(POST + b"Content-Length: 100\r\n\r\n{")
        await waiting.until(lambda: len(connections()) == 1)
        transport_of(writer).abort()
    labels = {"route": "reserve", "method": "POST", "code": "499"}
    await waiting.until(lambda: broker.metric("kubelend_http_requests_total", **labels) == 1)


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
async def test_client_that_goes_away_leaves_no_trace(broker, log, sent):
    async with connected(broker.cluster("slow")) as (_, writer):
        writer.write(sent)
        await writer.drain()
        transport_of(writer).abort()
    await others_are_served(broker)
    assert "exception" not in log.text
    assert log.lines("Request failed") == []


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"\x00\x01\x02\x03\r\n\r\n", id="no HTTP"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="no known version"),
        pytest.param(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", id="long path"),
        pytest.param(GET[:-2] + b"No colon here\r\n\r\n", id="header without a colon"),
        pytest.param(POST + b"Content-Length: -5\r\n\r\n", id="negative length"),
        pytest.param(POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", id="two lengths"),
        pytest.param(
            POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", id="both lengths"
        ),
    ],
)
async def test_what_is_no_http_is_answered_and_ends_the_connection(broker, log, sent):
    async with connected(broker.cluster("slow")) as (reader, writer):
        writer.write(sent)
        answer = await end_of(reader)
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert b'"code":"InvalidInput"' in answer
    (line,) = log.lines("Request rejected")
    assert line["error"].startswith("malformed HTTP request: ")
    assert "exception" not in log.text


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", id="no chunk"),
        pytest.param(b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n{}{}", id="not packed"),
    ],
)
async def test_body_that_is_not_as_its_headers_say_is_refused(broker, log, sent):
    async with connected(broker.cluster("slow")) as (reader, writer):
        writer.write(POST + sent)
        answer = await end_of(reader)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert answer.count(b"HTTP/1.") == 1
    assert b'"code":"InvalidInput"' in answer
    assert "exception" not in log.text


@pytest.mark.parametrize(
    "target, status",
    [
        pytest.param(b"/api/v1/clusters/%ff", b"403", id="no UTF-8"),
        pytest.param(b"/api/v1/clusters/%zz", b"403", id="no hexadecimal"),
        pytest.param(b"/api/v1/clusters/%", b"403", id="percent alone"),
        pytest.param(b"/api/v1/clusters/%00", b"404", id="zero"),
        pytest.param(b"/api/v1/reservations/%2e%2e%2fversion", b"404", id="dots"),
        pytest.param(b"/api/v1/reservations/../version", b"404", id="up"),
        pytest.param(b"//api/v1/version", b"404", id="two slashes"),
        pytest.param(b"/api/v1/version/", b"404", id="slash at the end"),
        pytest.param(b"/api/v1/VERSION", b"404", id="capitals"),
        pytest.param(b"/api/v1/version?limit=%ff&x=%zz", b"200", id="odd query"),
        pytest.param(b"/api/v1/reservations?limit=%ff", b"400", id="odd value"),
        pytest.param(b"https://localhost/api/v1/version", b"200", id="absolute"),
        pytest.param(b"*", b"400", id="asterisk"),
    ],
)
async def test_odd_targets_are_answered_like_any_other(broker, log, target, status):
    async with connected(broker.cluster("odd")) as (reader, writer):
        writer.write(GET.replace(b"/api/v1/version", target).replace(b"\r\n\r\n", CLOSE))
        answer = await end_of(reader)
    assert answer.split(b" ")[1] == status
    assert "exception" not in log.text


async def test_plain_text_to_the_tls_port_is_not_answered(broker, log):
    with contextlib.closing(socket.create_connection(("127.0.0.1", broker.port))) as plain:
        plain.sendall(GET)
        plain.settimeout(PATIENCE)
        received = await asyncio.to_thread(plain.recv, 1000)
    assert b"HTTP" not in received
    assert "exception" not in log.text


async def drip(writer, content):
    for byte in content:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)
