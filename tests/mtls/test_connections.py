"""Connections: limits of number and time, for clients that stall, stop, go away or are too many."""

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import brokers
import make
import raw_connections
import waiting
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from kubelend.transports import listener, server
from raw_connections import (
    GET,
    POST,
    answer_of,
    connected,
    end_of,
    others_are_served,
    transport_of,
)
from waiting import PATIENCE, until


def refused(broker, reason):
    return broker.metric("kubelend_connections_rejected_total", reason=reason)


def open_now(broker):
    return broker.metric("kubelend_open_connections")


async def all_arrived(broker, count):
    await until(lambda: open_now(broker) >= count)


def closed(connections):
    return [raw_connections.is_closed(connection) for connection in connections]


@contextlib.asynccontextmanager
async def opened(caller, count):
    """As many connections of a caller, each of which has been answered once."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            reader, writer = await stack.enter_async_context(connected(caller))
            writer.write(GET)
            assert (await answer_of(reader)).startswith(b"HTTP/1.1 200 ")
            made.append((reader, writer))
        yield made


async def is_answered(reader, writer):
    """Whether a connection still serves."""
    writer.write(GET)
    try:
        return (await answer_of(reader)).startswith(b"HTTP/1.1 200 ")
    except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
        return False


def is_accepted(broker, count):
    return open_now(broker) + refused(broker, "TooManyHandshakes") == count


def hello(caller):
    """What a TLS client says first."""
    outgoing = ssl.MemoryBIO()
    client = caller.context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("speaks", [False, True], ids=["silent", "silent after its hello"])
async def test_unfinished_handshakes_are_limited_and_an_honest_call_is_served(start, speaks):
    broker = await start(max_handshakes=5)
    with contextlib.ExitStack() as stack:
        connections = []
        for number in range(12):
            address = f"127.0.0.{2 + number % 3}"
            connections += stack.enter_context(raw_connections.silent(broker.port, 1, address))
            if speaks:
                connections[-1].sendall(hello(broker.cluster("a")))
            await until(partial(is_accepted, broker, number + 1))
        assert open_now(broker) == 5
        for _ in range(3):
            await others_are_served(broker)
        assert refused(broker, "TooManyHandshakes") == 8, "only the first had to be made room for"
        await until(lambda: closed(connections).count(True) == 8)


async def test_probe_that_only_connects_leaves_nothing_behind(broker, log):
    for _ in range(5):
        with raw_connections.silent(broker.port, 1):
            pass
    await others_are_served(broker)
    await until(lambda: open_now(broker) == 0)
    assert [line["event"] for line in log.all if line["level"] == "warning"] == []


async def test_end_of_a_broker_waits_for_no_handshake(certificates):
    with contextlib.ExitStack() as stack:
        limits: dict[str, Any] = dict.fromkeys(("handshake_timeout", "shutdown_timeout"), make.HOUR)
        async with brokers.running(certificates, **limits) as broker:
            connections = stack.enter_context(raw_connections.silent(broker.port, 5))
            await all_arrived(broker, 5)
            connections[0].sendall(hello(broker.cluster("a")))
            await until(lambda: has_answer(connections[0]))
        assert all(closed(connections))


def has_answer(connection):
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def test_caller_with_too_many_connections_loses_its_own_oldest_idle_one(start):
    """A person of the same name is another caller."""
    broker = await start(max_connections_per_caller=3)
    async with opened(broker.admin("a"), 1) as others, opened(broker.cluster("a"), 5) as made:
        assert [await is_answered(*pair) for pair in made] == [False, False, True, True, True]
        assert await is_answered(*others[0])
    assert refused(broker, "TooManyOfCaller") == 2


async def test_caller_whose_connections_are_all_at_work_is_refused_another(start, log):
    broker = await start(max_connections_per_caller=2)
    a = broker.cluster("a")
    async with a.stream() as first, a.stream() as second:
        await first.event()
        await second.event()
        async with connected(a) as (reader, writer):
            writer.write(GET)
            assert await end_of(reader) == b""
        await others_are_served(broker)
        await broker.cluster("r").advertise()
        assert refused(broker, "TooManyOfCaller") == 1
    (line,) = log.lines("Connection rejected")
    assert line["reason"] == "TooManyOfCaller"
    assert (line["caller"], line["remote"]) == ("cluster a", "127.0.0.1")


@pytest.mark.parametrize("trusted", [True, False])
async def test_only_a_trusted_proxy_has_as_many_as_it_likes(start, certificates, trusted):
    broker = await start(max_connections_per_caller=2, trust_proxies=trusted)
    directory = certificates.write("proxy-edge", identity.client_profile("edge", Role.PROXY))
    proxy = broker.holder(directory, "edge")
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            _, writer = await stack.enter_async_context(connected(proxy))
            writer.write(GET)
        await until(lambda: open_now(broker) == (6 if trusted else 2))
    assert refused(broker, "TooManyOfCaller") == (0 if trusted else 4)


async def test_flood_makes_one_line_and_all_are_counted(start, log):
    broker = await start(max_handshakes=1)
    with raw_connections.silent(broker.port, 30):
        await until(lambda: refused(broker, "TooManyHandshakes") == 29)
    (line,) = log.lines("Connection rejected")
    assert (line["reason"], line["remote"]) == ("TooManyHandshakes", "127.0.0.1")


async def test_many_refused_handshakes_of_one_address_make_one_line_and_are_counted(broker, log):
    for _ in range(10):
        with raw_connections.silent(broker.port, 1) as [plain]:
            plain.sendall(GET)
            assert b"HTTP" not in await asyncio.to_thread(plain.recv, 1000)
    name, labels = "kubelend_http_requests_rejected_total", {"route": "handshake"}
    await until(lambda: broker.metric(name, code="HandshakeRefused", **labels) == 10)
    (line,) = log.lines("TLS handshake rejected")
    assert (line["remote"], line["suppressed"]) == ("127.0.0.1", 0)
    assert "exception" not in log.text


async def test_client_that_pipelines_and_does_not_read_is_not_read_from(start):
    """What its buffers hold is answered; the rest waits, and is answered when it reads."""
    broker, count = await start(), 1000
    loud, labels = {"route": "get_advertisement", "method": "GET", "code": "200"}, 60
    done = partial(broker.metric, "kubelend_http_requests_total", **loud)
    caller = broker.cluster("loud")
    await caller.advertise(labels={f"{number:0300}": "x" * 253 for number in range(labels)})
    async with connected(caller) as (reader, writer):
        transport_of(writer).pause_reading()
        writer.write(GET.replace(b"version", b"advertisements/loud") * count)
        await until(lambda: done() > 0)
        before = -1.0
        while done() > before:
            before = done()
            await others_are_served(broker)
        assert before < count / 2
        transport_of(writer).resume_reading()
        answers, rest = 0, b""
        while answers < count:
            found = rest + await asyncio.wait_for(reader.read(2**20), PATIENCE)
            answers, rest = answers + found.count(b"HTTP/1.1 "), found[-8:]


async def test_ports_without_tls_answer_while_the_other_is_full(start):
    broker = await start(max_connections=1)
    async with broker.cluster("a").stream() as stream:
        await stream.event()
        for listener in ("probes", "metrics"):
            port = broker.process.ports[listener]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert (await end_of(reader)).startswith((b"HTTP/1.0 200 ", b"HTTP/1.0 404 "))
            writer.close()


async def test_running_out_of_files_neither_spins_nor_stops_the_server():
    async def answer(_):
        return web.Response(text="served")

    limits = server.ServerLimits()
    watch = Noted()
    async with server.serve_http(answer, "127.0.0.1", 0, limits, observer=watch) as port:
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        with no_files_left():
            spent, began = time.process_time(), time.monotonic()
            await until(lambda: "OutOfFiles" in watch.limits)
            await asyncio.sleep(0.5)
            busy = (time.process_time() - spent) / (time.monotonic() - began)
            assert busy < 0.5
            assert len(watch.limits) < 100
        for connection in waiting:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            connection.settimeout(PATIENCE)
            assert b"served" in await asyncio.to_thread(connection.recv, 1000)
            connection.close()


class Noted(listener.ConnectionObserver):
    def __init__(self):
        self.limits = []

    def connection_rejected(self, limit, remote, caller):
        self.limits.append(str(limit))


@contextlib.contextmanager
def no_files_left():
    """As if all files that the process may open were open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(found.name) for found in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


QUICK = make.SECOND / 5

pytestmark = pytest.mark.broker(
    read_timeout=QUICK, handshake_timeout=make.HOUR, idle_timeout=make.HOUR
)


@pytest.mark.parametrize(
    "calls, sent",
    [(0, GET[:1]), (0, GET[:-2]), (1, GET[:30])],
    ids=["one byte", "all but the last line", "half of the second"],
)
async def test_header_that_does_not_arrive_ends_the_connection(broker, calls, sent):
    async with connected(broker.cluster("slow")) as (reader, writer):
        for _ in range(calls):
            assert await is_answered(reader, writer)
        writer.write(sent)
        began = time.monotonic()
        await others_are_served(broker)
        assert await end_of(reader) == b""
        assert time.monotonic() - began > QUICK.total_seconds() / 2


SLOW_BODY = POST + b"Content-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    "sent, dripped, is_answered",
    [
        pytest.param(GET[:-2], b"X: " + b"x" * 1000, False, id="header"),
        pytest.param(SLOW_BODY, b" " * 1000, True, id="body"),
        pytest.param(SLOW_BODY + b'{"requested', b"", True, id="half a body"),
    ],
)
async def test_request_that_drips_ends_the_connection(broker, sent, dripped, is_answered):
    """Each byte is in time, the whole is not."""
    async with connected(broker.cluster("slow")) as (reader, writer):
        writer.write(sent)
        dripping = asyncio.create_task(drip(writer, dripped))
        await others_are_served(broker)
        answer = await end_of(reader)
        dripping.cancel()
        await asyncio.wait([dripping])
    assert answer.startswith(b"HTTP/1.1 408 " if is_answered else b"")
    assert (b'"code":"TooSlow"' in answer) == bool(answer) == is_answered


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["silent", "stalled"])
async def test_unfinished_handshake_ends_the_connection(start, sent):
    broker = await start(handshake_timeout=QUICK, read_timeout=make.HOUR, idle_timeout=make.HOUR)
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    writer.write(sent)
    await others_are_served(broker)
    await end_of(reader)
    writer.close()
    await until(lambda: open_now(broker) == 0)


async def test_idle_connection_ends_after_its_time_and_not_before(start):
    broker = await start(idle_timeout=3 * QUICK, read_timeout=QUICK)
    async with (
        connected(broker.cluster("silent")) as (silent, _),
        connected(broker.cluster("slow")) as (reader, writer),
    ):
        for _ in range(4):
            writer.write(GET[:30])  # a header that comes in pieces, but in time
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(GET[30:])
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(QUICK.total_seconds())
        assert await end_of(silent) == await end_of(reader) == b""


async def test_call_that_takes_long_is_not_cut_off_by_what_limits_clients(start):
    """A stream lasts, whatever the timeouts."""
    broker = await start(read_timeout=QUICK, idle_timeout=QUICK)
    a, r = broker.cluster("a"), broker.cluster("r")
    async with a.stream() as stream:
        await stream.event()
        await asyncio.sleep(2 * QUICK.total_seconds())
        await a.advertise()
        made = await r.reserve()
        assert (await stream.event()).instruction == ("provider", "Hold", made["id"])


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


async def test_client_that_does_not_wait_for_its_answer_is_counted_as_gone(start):
    """Its body is still to come: until then its call is open."""
    broker = await start()
    async with connected(broker.cluster("hasty")) as (_, writer):
        writer.write(POST + b"Content-Length: 100\r\n\r\n{")
        await waiting.until(lambda: len(connections()) == 1)
        transport_of(writer).abort()
    labels = {"route": "reserve", "method": "POST", "code": "499"}
    await waiting.until(lambda: broker.metric("kubelend_http_requests_total", **labels) == 1)


async def test_what_is_no_http_is_answered_logged_and_ends_the_connection(broker, log):
    async with connected(broker.cluster("slow")) as (reader, writer):
        writer.write(b"GET / HTTP/9.9\r\n\r\n")
        answer = await end_of(reader)
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert b'"code":"InvalidInput"' in answer
    (line,) = log.lines("Request rejected")
    assert line["error"].startswith("malformed HTTP request: ")
    assert "exception" not in log.text


async def drip(writer, content):
    for byte in content:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)
