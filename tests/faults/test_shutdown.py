"""After a signal the broker finishes the calls in progress, accepts no new ones, and exits with 0."""

import asyncio
import contextlib
import signal
import sqlite3

import pytest

import brokers
import raw_connections
import waiting
from callers import Caller, request_body
from waiting import PATIENCE


@contextlib.contextmanager
def writer_blocked(path):
    """While this lasts, nobody else can write to the database."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def refuses_connections(port):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    await writer.wait_closed()
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_calls_that_wait_for_the_disk_are_answered_before_the_end(
    certificates, tmp_path, number
):
    path = tmp_path / "kubelend.db"
    async with brokers.child(certificates, tmp_path) as broker:
        r = broker.cluster("r")
        await broker.cluster("a").advertise("100", "100Gi")
        await asyncio.gather(*(r.get("version") for _ in range(10)))
        with writer_blocked(path):
            calls = [
                asyncio.create_task(r.post("reservations", request_body("1m", "1Mi")))
                for _ in range(10)
            ]
            await asyncio.wait(calls, timeout=0.2)
            broker.process.send_signal(number)
            await waiting.until(lambda: refuses_connections(broker.port))
            assert broker.process.poll() is None
            assert not any(call.done() for call in calls)
        answers = await asyncio.gather(*calls)
        assert {answer.status for answer in answers} == {201}
        assert await asyncio.to_thread(broker.process.wait, PATIENCE) == 0
        assert broker.logged("Stopping")
        assert not any("exception" in line for line in broker.log())
    ledger = brokers.audited(path)
    assert {answer.json["id"] for answer in answers} == set(ledger.reservations)


async def test_idle_and_streaming_clients_do_not_hold_up_the_end(certificates, tmp_path):
    async with brokers.child(certificates, tmp_path, shutdown_timeout="1h") as broker:
        callers = [Caller(broker.port, certificates.cluster(f"c{n}"), f"c{n}") for n in range(5)]
        async with contextlib.AsyncExitStack() as stack:
            for caller in callers:
                stack.push_async_callback(caller.hang_up)
                await caller.get("version")
                stream = await stack.enter_async_context(caller.stream())
                await stream.event()
            assert await broker.stop() == 0


@pytest.mark.parametrize("allowed", ["500ms", "0s"])
async def test_request_that_never_ends_holds_up_the_end_no_longer_than_allowed(
    certificates, tmp_path, allowed
):
    async with contextlib.AsyncExitStack() as stack:

        async def stopping(name, allowed):
            (tmp_path / name).mkdir()
            started = brokers.child(
                certificates, tmp_path / name, read_timeout="1h", shutdown_timeout=allowed
            )
            broker = await stack.enter_async_context(started)
            stuck = raw_connections.connected(broker.cluster("slow"))
            _, writer = await stack.enter_async_context(stuck)
            writer.write(raw_connections.POST + b"Content-Length: 9\r\n\r\n")
            await writer.drain()
            await waiting.until(lambda: served_one(broker))
            broker.process.send_signal(signal.SIGTERM)
            return broker.process

        slow, quick = await stopping("slow", "1h"), await stopping("quick", allowed)
        assert await asyncio.to_thread(quick.wait, PATIENCE) == 0
        assert slow.poll() is None, "neither did what it was allowed to"


async def served_one(broker):
    return (await broker.cluster("other").get("version")).status == 200


async def test_second_signal_does_not_cut_off_what_the_first_let_finish(certificates, tmp_path):
    async with brokers.child(certificates, tmp_path) as broker:
        await broker.cluster("a").advertise()
        r = broker.cluster("r")
        await r.get("version")
        with writer_blocked(tmp_path / "kubelend.db"):
            call = asyncio.create_task(r.post("reservations", request_body()))
            await asyncio.wait([call], timeout=0.2)
            for _ in range(3):
                broker.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.05)
        assert (await call).status == 201
        assert await asyncio.to_thread(broker.process.wait, PATIENCE) == 0
