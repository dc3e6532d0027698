"""The listener: where it listens, who stays when it is full, and requests that are read in batches."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response

from kubelend.kits.ratelimit import CoalescingTimer
from kubelend.transports import listener as transports_listener
from kubelend.transports import server
from kubelend.transports.listener import (
    HANDSHAKE_GRACE_SECONDS,
    ConnectionLimit,
    ConnectionLimits,
    ConnectionSlot,
    ConnectionTable,
)
from kubelend.transports.server import MAX_BUFFERED_BYTES, ReadBatching, ServerLimits
from waiting import PATIENCE


class FakeConnection:
    """A connection that notes its end."""

    def __init__(self):
        self.is_idle = True
        self.is_dropped = False

    def drop(self):
        self.is_dropped = True


class Observer:
    def __init__(self):
        self.open = 0
        self.rejected = []

    def opened(self):
        self.open += 1

    def closed(self):
        self.open -= 1

    def connection_rejected(self, limit, remote, caller):
        self.rejected.append((limit, remote, caller))

    def handshake_rejected(self, remote, reason):
        raise AssertionError("nobody shakes hands here")


@pytest.fixture
def observer():
    return Observer()


def arrive(table, remote="1.1.1.1", at=0.0):
    slot = ConnectionSlot(remote, FakeConnection(), at)
    assert table.add(slot)
    return slot


def is_refused(table, remote="9.9.9.9", at=0.0):
    return not table.add(ConnectionSlot(remote, FakeConnection(), at))


def enter(table, caller="a", remote="1.1.1.1"):
    slot = arrive(table, remote)
    assert table.authenticated(slot, caller, FakeConnection())
    return slot


def begin_call(table, slot):
    slot.connection.is_idle = False
    table.mark_busy(slot)


def end_call(table, slot):
    slot.connection.is_idle = True
    table.mark_idle(slot)


def dropped(*slots):
    return [slot.connection.is_dropped for slot in slots]


def test_handshakes_at_the_limit_are_shared_by_addresses_and_the_oldest_goes(observer):
    table = ConnectionTable(ConnectionLimits(100, 10, 4), observer)
    finished = [enter(table, caller, "7.7.7.7") for caller in ("a", "b", None, None)]
    first, other = arrive(table), arrive(table, "2.2.2.2")
    second, third = arrive(table), arrive(table)
    assert is_refused(table, "1.1.1.1", at=HANDSHAKE_GRACE_SECONDS / 2)
    arrive(table, "3.3.3.3", at=HANDSHAKE_GRACE_SECONDS / 2)
    assert dropped(first, other, second, third) == [True, False, False, False]
    arrive(table, "2.2.2.2", at=HANDSHAKE_GRACE_SECONDS)
    assert dropped(other, second, third) == [False, True, False]
    assert [remote for _, remote, _ in observer.rejected] == ["1.1.1.1"] * 3
    assert {limit for limit, _, _ in observer.rejected} == {ConnectionLimit.HANDSHAKES}
    assert dropped(*finished) == [False] * 4
    assert observer.open == 4 + len(finished)


def test_handshakes_of_known_addresses_come_first(observer):
    """Known is an address from which somebody has shown a certificate."""
    table = ConnectionTable(ConnectionLimits(100, 10, 2), observer)
    enter(table, "a", "7.7.7.7")
    enter(table, "8.8.8.8", "8.8.8.8")
    strangers = [arrive(table, remote) for remote in ("1.1.1.1", "2.2.2.2")]
    assert is_refused(table, "8.8.8.8"), "no certificate"
    known = [arrive(table, "7.7.7.7") for _ in strangers]
    assert dropped(*strangers, *known) == [True, True, False, False]
    assert is_refused(table, "3.3.3.3")


def test_at_the_limit_an_unfinished_handshake_goes_before_a_known_caller(observer):
    table = ConnectionTable(ConnectionLimits(3, 10, 10), observer)
    known = enter(table, "a")
    first, second = arrive(table, "2.2.2.2"), arrive(table, "3.3.3.3")
    new = arrive(table)
    assert dropped(known, first, second, new) == [False, True, False, False]
    assert observer.rejected == [(ConnectionLimit.CONNECTIONS, "2.2.2.2", None)]
    assert observer.open == 3


def test_at_the_limit_the_longest_idle_goes(observer):
    table = ConnectionTable(ConnectionLimits(3, 10, 10), observer)
    a, b, c = (enter(table, name) for name in "abc")
    for slot in (a, c, b):
        begin_call(table, slot)
        end_call(table, slot)
    enter(table, "d")
    enter(table, "e")
    assert dropped(a, b, c) == [True, False, True]
    assert [caller for _, _, caller in observer.rejected] == ["a", "c"]


def test_connection_with_a_call_in_progress_or_just_before_one_stays(observer):
    """Between its last byte and its call the connection is still in the table as idle."""
    table = ConnectionTable(ConnectionLimits(3, 10, 10), observer)
    busy, about_to, idle = (enter(table, name) for name in "abc")
    begin_call(table, busy)
    about_to.connection.is_idle = False
    enter(table, "d")
    assert dropped(busy, about_to, idle) == [False, False, True]


def test_connection_is_refused_when_all_are_at_work(observer):
    table = ConnectionTable(ConnectionLimits(2, 10, 10), observer)
    slots = [enter(table, name) for name in "ab"]
    for slot in slots:
        begin_call(table, slot)
    assert is_refused(table)
    assert dropped(*slots) == [False, False]
    assert observer.rejected == [(ConnectionLimit.CONNECTIONS, "9.9.9.9", None)]
    assert observer.open == 2
    end_call(table, slots[1])
    arrive(table)
    assert dropped(*slots) == [False, True]


def test_caller_with_too_many_loses_one_of_its_own_that_is_idle(observer):
    table = ConnectionTable(ConnectionLimits(100, 2, 10), observer)
    other, first, second = enter(table, "b"), enter(table, "a"), enter(table, "a")
    begin_call(table, first)
    third = enter(table, "a")
    assert dropped(other, first, second, third) == [False, False, True, False]
    assert observer.rejected == [(ConnectionLimit.CALLER, "1.1.1.1", "a")]


def test_caller_with_too_many_at_work_is_refused_and_nobody_else(observer):
    table = ConnectionTable(ConnectionLimits(100, 2, 10), observer)
    for slot in (enter(table, "a"), enter(table, "a")):
        begin_call(table, slot)
    third = arrive(table)
    assert table.authenticated(third, "a", FakeConnection()) is False
    assert observer.rejected == [(ConnectionLimit.CALLER, "1.1.1.1", "a")]
    assert observer.open == 2
    enter(table, "b")


def test_one_connection_for_each_caller_is_possible(observer):
    table = ConnectionTable(ConnectionLimits(100, 1, 10), observer)
    slots = [enter(table, "a") for _ in range(3)]
    assert dropped(*slots) == [True, True, False]
    assert observer.open == 1


def test_who_left_counts_no_longer_and_may_leave_again(observer):
    table = ConnectionTable(ConnectionLimits(1, 1, 1), observer)
    for _ in range(3):
        slot = enter(table, "a")
        table.remove(slot)
        table.remove(slot)
        arrival = arrive(table)
        table.remove(arrival)
    assert observer.open == 0
    assert observer.rejected == []


def test_call_that_ends_after_its_connection_does_not_bring_it_back(observer):
    table = ConnectionTable(ConnectionLimits(1, 10, 10), observer)
    slot = enter(table, "a")
    begin_call(table, slot)
    table.remove(slot)
    end_call(table, slot)
    new = enter(table, "b")
    begin_call(table, new)
    assert is_refused(table)
    assert dropped(slot) == [False]


def test_whoever_needs_a_file_gets_the_one_that_made_room(observer):
    table = ConnectionTable(ConnectionLimits(), observer)
    assert table.close_one(ConnectionLimit.FILES) is None
    known, unknown = enter(table), arrive(table)
    assert table.close_one(ConnectionLimit.FILES) is unknown
    assert table.close_one(ConnectionLimit.FILES) is known
    assert [limit for limit, _, _ in observer.rejected] == [ConnectionLimit.FILES] * 2


def test_end_lets_go_of_unfinished_handshakes_only(observer):
    table = ConnectionTable(ConnectionLimits(), observer)
    known, unknown = enter(table), arrive(table)
    table.close_handshakes()
    assert dropped(known, unknown) == [False, True]
    assert observer.open == 1


async def test_empty_host_listens_on_every_family_of_the_machine():
    listeners = await transports_listener.open_listeners("", 0)
    try:
        assert socket.AF_INET in {found.family for found in listeners}
        assert all(found.getsockname()[1] for found in listeners)
    finally:
        for found in listeners:
            found.close()


async def test_address_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await transports_listener.open_listeners("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
async def test_address_of_another_machine_is_an_error(host):
    with pytest.raises(OSError):
        await transports_listener.open_listeners(host, 0)


async def test_the_standard_loop_serves_too():
    async def answer(_):
        return web.Response(text="served")

    async with server.serve_http(answer, "127.0.0.1", 0, server.ServerLimits()) as port:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            assert (await reader.read()).endswith(b"served")
            writer.close()
            await writer.wait_closed()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


HOUR, SOON = 3600.0, 0.05

GET = b"GET /news HTTP/1.1\r\nHost: localhost\r\n\r\n"


def say(body: bytes) -> bytes:
    head = b"POST /said HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


@asynccontextmanager
async def connected(port: int):
    limit = 8 * MAX_BUFFERED_BYTES
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.close()


@asynccontextmanager
async def listening(seconds: float, rate: int = 0):
    async def echo(request: BaseRequest) -> Response:
        return Response(body=b"<" + await request.read() + b">")

    batching = ReadBatching(b"POST /said ", CoalescingTimer(seconds, rate))
    limits = ServerLimits(body=4 * MAX_BUFFERED_BYTES, read_batching=batching)
    async with server.serve_http(echo, "127.0.0.1", 0, limits) as port:
        yield port


async def body_of(reader: asyncio.StreamReader) -> bytes:
    text = await asyncio.wait_for(reader.readuntil(b">"), PATIENCE)
    return text[text.index(b"<") :]


async def is_silent(reader: asyncio.StreamReader) -> bool:
    """Asked after somebody else was answered who came later."""
    try:
        await asyncio.wait_for(reader.read(1), SOON)
    except TimeoutError:
        return True
    return False


async def test_one_that_comes_soon_after_waits_and_others_do_not():
    async with (
        listening(HOUR) as port,
        connected(port) as (first, to_first),
        connected(port) as (second, to_second),
        connected(port) as (other, to_other),
    ):
        for text in (b"first", b"rare"):
            to_first.write(say(text))
            assert await body_of(first) == b"<" + text + b">"
        to_second.write(say(b"two"))
        assert await body_of(second) == b"<two>", "the first of a connection"
        to_second.write(say(b"three"))
        to_other.write(GET)
        assert await body_of(other) == b"<>"
        assert await is_silent(second)


async def test_nobody_waits_while_there_are_few_of_them():
    async with listening(HOUR, rate=10) as port, connected(port) as (reader, writer):
        for text in (b"one", b"two", b"three"):
            writer.write(say(text))
            assert await body_of(reader) == b"<" + text + b">"


async def test_what_waits_is_answered_before_the_listener_closes():
    async with listening(HOUR) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for text in (b"first", b"rare"):
            writer.write(say(text))
            assert await body_of(reader) == b"<" + text + b">"
        writer.write(say(b"two"))
        assert await is_silent(reader)
    assert await body_of(reader) == b"<two>"
    writer.close()


async def test_what_comes_in_pieces_is_read_whole():
    async with listening(SOON) as port, connected(port) as (reader, writer):
        for text in (b"one", b"two", b"three"):
            for piece in (say(text)[:20], say(text)[20:-2], say(text)[-2:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            assert await body_of(reader) == b"<" + text + b">"


async def test_who_sends_much_is_read_at_once():
    async with listening(HOUR) as port, connected(port) as (reader, writer):
        writer.write(say(b"one"))
        assert await body_of(reader) == b"<one>"
        much = b"x" * (2 * MAX_BUFFERED_BYTES)
        writer.write(say(much))
        assert await body_of(reader) == b"<" + much + b">"


async def test_who_leaves_takes_nobody_along():
    async with listening(SOON) as port, connected(port) as (reader, writer):
        writer.write(say(b"one"))
        assert await body_of(reader) == b"<one>"
        async with connected(port) as (_, leaving):
            leaving.write(say(b"gone"))
        writer.write(say(b"two"))
        assert await body_of(reader) == b"<two>"


@pytest.mark.parametrize("count", [2, 5])
async def test_several_at_once_on_one_connection_are_all_answered_in_order(count):
    async with listening(SOON) as port, connected(port) as (reader, writer):
        texts = [b"%d" % number for number in range(count)]
        writer.write(b"".join(map(say, texts)))
        assert [await body_of(reader) for _ in texts] == [b"<" + text + b">" for text in texts]
