"""A stream of instructions moves to a new certificate by itself: no event is lost, and none comes twice."""

import asyncio
import contextlib
from datetime import UTC, datetime

import msgspec
import pytest

import brokers
import waiting
from certificates import Certificates
from holders import LATER, Holder
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from scripted_broker import ScriptedBroker, events
from waiting import PATIENCE

RESERVATION = bodies.Reservation(
    "rsv-a-1",
    "a",
    "b",
    bodies.Quantities("1", "1Gi"),
    bodies.ReservationStatus("Reserved", "Locked"),
    datetime(2026, 1, 1, tzinfo=UTC),
)
MANY = 120
LITTLE = bodies.ReservationRequest(bodies.Quantities("10m", "1Mi"))


@pytest.fixture
def holder(tmp_path):
    return Holder(tmp_path, Certificates(tmp_path / "certificates"))


@pytest.fixture
async def scripted(holder):
    async with ScriptedBroker(holder.certificates.server()) as broker:
        yield broker


def event(revision):
    instruction = bodies.Instruction(revision, "provider", "Hold", "Hold it", RESERVATION)
    return b"id: %d\nevent: instruction\ndata: %s\n\n" % (
        revision,
        msgspec.json.encode(instruction),
    )


async def test_a_silent_stream_moves_to_the_new_certificate_and_goes_on_from_where_it_was(
    holder, scripted
):
    old = holder.serial
    scripted.responses += [events(event(1) + event(2), stay=True), events(event(3), stay=True)]
    # Without a single retry: a new certificate is no failure.
    async with (
        holder.client(scripted.url) as client,
        contextlib.aclosing(client.stream()) as stream,
    ):
        assert [(await anext(stream)).revision for _ in range(2)] == [1, 2]
        holder.renew()
        assert (await anext(stream)).revision == 3
        assert [seen.serial for seen in scripted.seen] == [old, holder.serial]
        assert scripted.seen[1].headers["Last-Event-ID"] == "2"
        await waiting.until(lambda: scripted.open_connections == 1)


async def test_what_came_before_the_change_and_was_not_read_is_not_lost(holder, scripted):
    """A reader that takes its time: the rest of what it was sent is its own, and not asked for again."""
    scripted.responses += [events(event(1) + event(2), stay=True), events(event(3), stay=True)]
    async with (
        holder.client(scripted.url) as client,
        contextlib.aclosing(client.stream()) as stream,
    ):
        assert (await anext(stream)).revision == 1
        holder.renew()
        await client.refresh()
        assert [(await anext(stream)).revision for _ in range(2)] == [2, 3]
        assert scripted.seen[1].headers["Last-Event-ID"] == "2"


async def test_half_an_event_at_the_change_comes_again_whole(holder, scripted):
    half = event(2)[:-10]
    scripted.responses += [events(event(1) + half, stay=True), events(event(2), stay=True)]
    async with (
        holder.client(scripted.url) as client,
        contextlib.aclosing(client.stream()) as stream,
    ):
        assert (await anext(stream)).revision == 1
        holder.renew()
        assert (await anext(stream)).revision == 2
        assert scripted.seen[1].headers["Last-Event-ID"] == "1"


async def test_a_stream_that_is_left_gives_its_old_connection_back(holder, scripted):
    scripted.responses.append(events(event(1), stay=True))
    async with holder.client(scripted.url, LATER) as client:
        async with contextlib.aclosing(client.stream()) as stream:
            await anext(stream)
            holder.renew()
            assert await client.refresh()
        await waiting.until(lambda: scripted.open_connections == 0)


async def test_every_event_comes_once_while_the_certificate_changes_again_and_again(
    holder, tmp_path
):
    certificates = holder.certificates
    resets: list[int] = []
    received: list[str] = []
    made: list[str] = []
    lender = Holder(tmp_path, certificates, "lender")
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(brokers.running(certificates))
        url = f"https://localhost:{broker.port}"
        client = await stack.enter_async_context(lender.client(url))
        borrower = await stack.enter_async_context(
            BrokerClient(url, certificates.cluster("borrower"))
        )
        capacity = bodies.Metrics(bodies.Quantities("100", "100Gi"))
        await client.publish(bodies.Advertisement("lender", capacity))

        async def listen():
            stream = client.stream(on_reset=lambda: resets.append(1))
            async with contextlib.aclosing(stream):
                while len(received) < MANY:
                    received.append((await anext(stream)).reservation.id)

        listening = asyncio.create_task(listen())
        while len(made) < MANY:
            if len(made) % 10 == 0:
                lender.renew()
            made.append((await borrower.reserve(LITTLE)).id)
        await asyncio.wait_for(listening, PATIENCE)
    assert received == made
    assert resets == [1]
