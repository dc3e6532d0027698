"""Connections have limits: of all, of one caller, of one address. Who is over them harms nobody else."""

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import bare
import brokers
import make
from bare import GET, answer_of, connected, end_of, others_are_served
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from kubelend.transports import server
from waiting import PATIENCE, until


def refused(broker, reason):
    return broker.metric("kubelend_connections_rejected_total", reason=reason)


def open_now(broker):
    return broker.metric("kubelend_open_connections")


async def all_arrived(broker, count):
    await until(lambda: open_now(broker) >= count)


def closed(connections):
    return [bare.is_closed(connection) for connection in connections]


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


# -- unfinished handshakes


def hello(caller):
    """What a TLS client says first."""
    outgoing = ssl.MemoryBIO()
    client = caller.context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("speaks", [False, True], ids=["silent", "silent after its hello"])
async def test_unfinished_handshakes_of_an_address_are_limited_and_the_oldest_goes(start, speaks):
    broker = await start(max_handshakes=5)
    with bare.silent(broker.port, 12, "127.0.0.2") as connections:
        for count, connection in enumerate(connections, 1):
            if speaks:
                connection.sendall(hello(broker.cluster("a")))
            await all_arrived(broker, min(count, 5))
        await until(lambda: refused(broker, "TooManyHandshakes") == 7)
        await others_are_served(broker)
        await until(lambda: all(closed(connections[:7])))
        assert not any(closed(connections[7:]))
        assert open_now(broker) <= 6


async def test_client_of_the_very_same_address_gets_in_all_the_same(start):
    """Behind one address there may be many: an honest handshake is short, and so never the oldest."""
    broker = await start(max_handshakes=5)
    with bare.silent(broker.port, 50):
        for _ in range(5):
            await others_are_served(broker)


async def test_silent_connection_ends_after_the_time_of_a_handshake(start):
    broker = await start(
        handshake_timeout=make.SECOND / 5, read_timeout=make.HOUR, idle_timeout=make.HOUR
    )
    with bare.silent(broker.port, 3) as connections:
        await all_arrived(broker, 3)
        await until(lambda: all(closed(connections)))
    await until(lambda: open_now(broker) == 0)


async def test_probe_that_only_connects_leaves_nothing_behind(broker, log):
    for _ in range(5):
        with bare.silent(broker.port, 1):
            pass
    await others_are_served(broker)
    await until(lambda: open_now(broker) == 0)
    assert [line["event"] for line in log.all if line["level"] == "warning"] == []


async def test_end_of_a_broker_waits_for_no_handshake(certificates):
    with contextlib.ExitStack() as stack:
        limits: dict[str, Any] = dict.fromkeys(("handshake_timeout", "shutdown_timeout"), make.HOUR)
        async with brokers.running(certificates, **limits) as broker:
            connections = stack.enter_context(bare.silent(broker.port, 5))
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


# -- of one caller


async def test_caller_with_too_many_connections_loses_its_own_oldest_idle_one(start):
    broker = await start(max_connections_per_caller=3)
    async with opened(broker.cluster("b"), 1) as others, opened(broker.cluster("a"), 5) as made:
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


async def test_person_and_cluster_of_one_name_have_connections_of_their_own(start):
    broker = await start(max_connections_per_caller=1)
    async with opened(broker.cluster("x"), 1) as one, opened(broker.admin("x"), 1) as two:
        assert await is_answered(*one[0])
        assert await is_answered(*two[0])


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


# -- of all


async def test_beyond_the_limit_the_longest_idle_connection_goes(start):
    broker = await start(max_connections=3)
    async with (
        opened(broker.cluster("a"), 1) as a,
        opened(broker.cluster("b"), 1) as b,
        opened(broker.cluster("c"), 1) as c,
    ):
        assert await is_answered(*a[0])
        async with opened(broker.cluster("d"), 1):
            answered = [await is_answered(*pair) for pair in (a[0], b[0], c[0])]
    assert answered == [True, False, True]
    assert refused(broker, "TooManyConnections") == 1


async def test_connection_with_a_call_in_progress_is_never_the_one_to_go(start):
    broker = await start(max_connections=2)
    a = broker.cluster("a")
    async with a.stream() as stream:
        await stream.event()
        await a.advertise()
        for name in ("b", "c", "d"):
            await broker.cluster(name).get("version")
        made = await broker.cluster("r").reserve()
        assert (await stream.event()).told == ("provider", "Hold", made["id"])
    assert refused(broker, "TooManyConnections") == 4


async def test_newcomer_is_refused_while_all_are_at_work_and_let_in_later(start):
    broker = await start(max_connections=2)
    async with broker.cluster("a").stream() as one:
        async with broker.cluster("b").stream() as two:
            await one.event()
            await two.event()
            with bare.silent(broker.port, 1) as connections:
                await until(lambda: all(closed(connections)))
            assert refused(broker, "TooManyConnections") == 1
        await broker.cluster("b").hang_up()
        await until(lambda: open_now(broker) == 1)
        await others_are_served(broker)


async def test_flood_of_strangers_closes_no_connection_of_anybody_known(start):
    broker = await start(max_connections=20)
    async with opened(broker.cluster("a"), 5) as made:
        with contextlib.ExitStack() as stack:
            for number in range(2, 12):
                stack.enter_context(bare.silent(broker.port, 20, f"127.0.0.{number}"))
                await asyncio.sleep(0)
            await until(lambda: refused(broker, "TooManyConnections") >= 185)
            assert [await is_answered(*pair) for pair in made] == [True] * 5
            await others_are_served(broker)


@pytest.mark.timeout(120)
async def test_five_hundred_idle_tls_connections_stay_and_others_are_served(start):
    broker = await start(max_connections_per_caller=100)
    clusters = [broker.cluster(f"idle-{number}") for number in range(10)]
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for _ in range(50):
            opening = [stack.enter_async_context(connected(caller)) for caller in clusters]
            made += [await found for found in opening]
        await until(lambda: open_now(broker) == 500)
        async with asyncio.timeout(PATIENCE):
            for _ in range(20):
                await others_are_served(broker)
        assert all([await is_answered(*pair) for pair in made[::50]])
    assert broker.metric("kubelend_connections_rejected_total", reason="TooManyOfCaller") == 0


# -- what is logged of it


async def test_open_connections_are_counted(broker):
    assert open_now(broker) == 0
    async with opened(broker.cluster("a"), 3):
        with bare.silent(broker.port, 2):
            await all_arrived(broker, 5)
            assert open_now(broker) == 5
    await until(lambda: open_now(broker) == 0)


async def test_flood_makes_one_line_and_all_are_counted(start, log):
    broker = await start(max_handshakes=1)
    with bare.silent(broker.port, 30):
        await until(lambda: refused(broker, "TooManyHandshakes") == 29)
    (line,) = log.lines("Connection rejected")
    assert (line["reason"], line["remote"]) == ("TooManyHandshakes", "127.0.0.1")


async def test_many_refused_handshakes_of_one_address_make_one_line_and_are_counted(broker, log):
    for _ in range(10):
        with bare.silent(broker.port, 1) as connections:
            connections[0].sendall(GET)
            await until(lambda: all(closed(connections)))
    (line,) = log.lines("TLS handshake rejected")
    assert (line["remote"], line["suppressed"]) == ("127.0.0.1", 0)
    name, labels = "kubelend_http_requests_rejected_total", {"route": "handshake"}
    assert broker.metric(name, code="HandshakeRefused", **labels) == 10


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


# -- no file left


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


class Noted(server.NullObserver):
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
