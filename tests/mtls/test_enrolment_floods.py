"""At the enrolment listener anybody may call: no few addresses keep newcomers out."""

import asyncio
import contextlib
import ssl
import time

import aiohttp
import pytest

import bare
import brokers
import make
import newcomers
import waiting
from kubelend.api import enrolment
from kubelend.transports.listener import ConnectionLimits
from newcomers import Newcomer
from troubled import TroubledStore
from waiting import PATIENCE

HEAD = b"POST /enrol/v1/join HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"

pytestmark = pytest.mark.broker("enrolling")


@contextlib.asynccontextmanager
async def holding(broker, count, sent=HEAD, source="127.0.0.1"):
    """Connections from this address that have sent this much, and no more."""
    context = ssl.create_default_context(cafile=str(broker.certificates.server() / "ca.crt"))
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1",
                broker.process.ports["enrol"],
                ssl=context,
                server_hostname="localhost",
                local_addr=(source, 0),
            )
            stack.push_async_callback(_abort, writer)
            writer.write(sent)
            readers.append(reader)
        yield readers


async def _abort(writer):
    bare.transport_of(writer).abort()
    writer.close()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()


def refused(broker, reason):
    return broker.metric("kubelend_connections_rejected_total", reason=reason)


async def test_bodies_that_do_not_come_keep_no_newcomer_out(certificates, tmp_path, monkeypatch):
    monkeypatch.setattr(
        enrolment,
        "ENROLMENT_CONNECTIONS",
        ConnectionLimits(connections=12, per_caller=4, handshakes_per_address=4),
    )
    async with (
        newcomers.enrolling(certificates, tmp_path) as broker,
        holding(broker, 4, source="127.0.0.2"),
        holding(broker, 4, source="127.0.0.3"),
        holding(broker, 4, source="127.0.0.4"),
    ):
        token = await newcomers.token(broker, name="berlin")
        await Newcomer("berlin").join(broker, token, tmp_path / "berlin")
        assert refused(broker, "TooManyConnections") >= 1


async def test_answered_call_whose_body_does_not_come_may_go_too(
    certificates, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        enrolment,
        "ENROLMENT_CONNECTIONS",
        ConnectionLimits(connections=4, per_caller=4, handshakes_per_address=4),
    )
    nowhere = HEAD.replace(b"/enrol/v1/join", b"/nowhere")
    async with (
        newcomers.enrolling(certificates, tmp_path) as broker,
        holding(broker, 4, nowhere, source="127.0.0.2") as readers,
    ):
        for reader in readers:
            assert b" 404 " in await reader.readline()
        assert (await newcomers.call(broker, "GET", "/enrol/v1/authorities")).status == 200


async def test_one_address_has_few_connections(broker):
    async with holding(broker, enrolment.ENROLMENT_CONNECTIONS.per_caller + 3) as readers:
        token = await newcomers.token(broker, name="berlin")
        answer = await Newcomer("berlin").ask(broker, token)  # from the same address
        assert answer.status == 200
        assert refused(broker, "TooManyOfCaller") == 4
        for reader in readers[:4]:
            assert await bare.end_of(reader) == b""


@pytest.mark.broker("enrolling", read_timeout=make.HOUR)
async def test_body_is_not_waited_for_long(broker):
    began = time.monotonic()
    async with holding(broker, 1) as (reader,):
        async with asyncio.timeout(PATIENCE):
            assert b" 408 " in await reader.readline()
    assert time.monotonic() - began > enrolment.READ_TIMEOUT * 0.9


async def test_call_in_progress_is_not_ended_for_another(certificates, tmp_path, monkeypatch):
    """The whole body has come, and the answer waits for the store."""
    monkeypatch.setattr(
        enrolment,
        "ENROLMENT_CONNECTIONS",
        ConnectionLimits(connections=2, per_caller=1, handshakes_per_address=2),
    )
    store = TroubledStore()
    async with newcomers.enrolling(
        certificates, tmp_path, open_store=brokers.reopening(store)
    ) as broker:
        token = await newcomers.token(broker, name="berlin")
        before = store.commits
        store.hold()
        asking = asyncio.create_task(Newcomer("berlin").ask(broker, token))
        await waiting.until(lambda: store.commits > before)
        with pytest.raises(aiohttp.ClientError):
            await newcomers.call(broker, "GET", "/enrol/v1/authorities")
        store.let_go()
        assert (await asking).status == 200
