"""What only a network can do: answers that are lost, lines that are cut or half open, certificates in use."""

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from aiohttp import web

from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.core.errors import BrokerUnreachable, Forbidden, NotReady
from kubelend.wire import bodies, route
from scripted_broker import body, events, hang_up, problem, raw, say_nothing
from waiting import PATIENCE, until

MOMENT = timedelta(milliseconds=100)
RESERVATION = bodies.Reservation(
    "rsv-a-1",
    "a",
    "b",
    bodies.Quantities("1", "1Gi"),
    bodies.ReservationStatus("Reserved", "Locked"),
    datetime(2026, 1, 1, tzinfo=UTC),
)
REQUEST = bodies.ReservationRequest(RESERVATION.requested_resources)
RESET = b"event: reset\ndata: {}\n\n"

pytestmark = pytest.mark.broker("scripted")


@pytest.fixture
async def communicator(broker, certificates):
    opened = await opening(broker, certificates, idle_timeout=MOMENT)
    yield opened
    await opened.close()


async def opening(broker, certificates, **options):
    return await factory.open_communicator(
        "http", CommunicatorOptions(broker.url, certificates.cluster("a"), **options)
    )


def event(revision):
    instruction = bodies.Instruction(revision, "provider", "Hold", "Hold it", RESERVATION)
    return b"id: %d\nevent: instruction\ndata: %s\n\n" % (
        revision,
        msgspec.json.encode(instruction),
    )


async def revisions(communicator, resets=None):
    """What a stream says until it breaks, and by what."""
    marks = [] if resets is None else resets
    found = []
    try:
        async with aclosing(communicator.stream(lambda: marks.append("reset"))) as stream:
            while True:
                found.append((await anext(stream)).revision)
    except BrokerUnreachable as error:
        return found, error.message


def resumed(broker):
    return [seen.headers.get(route.LAST_EVENT_ID, "") for seen in broker.seen]


# -- calls


async def test_a_request_whose_answer_was_lost_is_repeated_with_its_key(broker, communicator):
    broker.responses += [hang_up, body(RESERVATION, 201)]
    assert await communicator.request(REQUEST, "the key") == RESERVATION
    assert [seen.headers[route.IDEMPOTENCY_KEY] for seen in broker.seen] == ["the key"] * 2


async def test_a_broker_that_is_down_is_given_up_after_a_few_tries(broker, communicator):
    broker.responses.append(problem(NotReady("starting")))
    with pytest.raises(NotReady):
        await communicator.request(REQUEST, "k")
    assert len(broker.seen) == 3


async def test_a_refusal_is_not_repeated(broker, communicator):
    broker.responses.append(problem(Forbidden("no")))
    with pytest.raises(Forbidden):
        await communicator.activate("rsv-a-1")
    assert len(broker.seen) == 1


async def test_a_broker_that_says_nothing_is_given_up(broker, certificates):
    broker.responses.append(say_nothing)
    impatient = await opening(broker, certificates, timeout=timedelta(milliseconds=50))
    with pytest.raises(BrokerUnreachable, match="did not answer within"):
        await impatient.ping()
    await impatient.close()


async def test_a_proxy_that_answers_for_a_broker_that_is_not_ready(broker, communicator):
    broker.responses.append(raw(b"not ready: starting", 503))
    with pytest.raises(NotReady, match="the broker is not ready: starting"):
        await communicator.ping()


async def test_connections_are_used_again(broker, communicator):
    broker.responses.append(body(RESERVATION))
    for _ in range(3):
        await communicator.find("rsv-a-1")
    assert len(broker.connections) == 1


async def test_every_call_says_which_agent_it_is(broker, certificates):
    broker.responses += [body(RESERVATION), events(event(1))]
    named = await opening(broker, certificates, instance="agent-7", idle_timeout=MOMENT)
    await named.find("rsv-a-1")
    await revisions(named)
    assert [seen.headers[route.AGENT_HEADER] for seen in broker.seen] == ["agent-7"] * 2
    await named.close()


async def test_only_unfinished_reservations_are_asked_for(broker, communicator):
    broker.responses += [
        body(bodies.ReservationList([RESERVATION], next="7")),
        body(bodies.ReservationList([RESERVATION])),
    ]
    assert await communicator.instructions() == [RESERVATION] * 2
    assert [seen.query for seen in broker.seen] == [
        {"phase": "Pending,Reserved,Active", "limit": "1000"},
        {"phase": "Pending,Reserved,Active", "limit": "1000", "continue": "7"},
    ]


# -- the stream


async def test_a_cut_stream_fails_at_once_and_goes_on_behind_the_last(broker, communicator):
    broker.responses += [events(event(1) + event(2)), events(event(3)), events(b"")]
    assert (await revisions(communicator))[0] == [1, 2]
    assert (await revisions(communicator))[0] == [3]
    assert (await revisions(communicator))[0] == []
    assert resumed(broker) == ["", "2", "3"]


async def test_a_stream_that_cannot_be_opened_is_tried_once(broker, communicator):
    broker.responses.append(problem(NotReady("starting")))
    with pytest.raises(NotReady):
        await anext(communicator.stream(lambda: None))
    assert len(broker.seen) == 1


async def test_half_an_event_is_not_taken(broker, communicator):
    broker.responses += [events(event(1) + event(2)[:-10]), events(event(2))]
    assert (await revisions(communicator))[0] == [1]
    assert (await revisions(communicator))[0] == [2]
    assert resumed(broker) == ["", "1"]


async def test_after_a_reset_the_numbers_of_before_mean_nothing(broker, communicator):
    """A broker whose store was lost counts from the start: behind the old number it would be silent."""
    resets: list[str] = []
    broker.responses += [events(event(7)), events(RESET), events(RESET + event(2)), events(b"")]
    for expected in ([7], [], [2], []):
        assert (await revisions(communicator, resets))[0] == expected
    assert resumed(broker) == ["", "7", "", "2"]
    assert resets == ["reset"] * 2


async def test_a_line_that_is_half_open_is_noticed(broker, communicator):
    broker.responses.append(events(event(1), stay=True))
    async with asyncio.timeout(PATIENCE):
        found, words = await revisions(communicator)
    assert found == [1]
    assert "did not answer within 100ms" in words


async def test_signs_of_life_keep_a_silent_stream_open(broker, communicator):
    async def heartbeats(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(6):
            await response.write(b": alive\n\n")
            await asyncio.sleep(MOMENT.total_seconds() / 2)
        await response.write(event(1))
        return response

    broker.responses.append(heartbeats)
    assert (await revisions(communicator))[0] == [1]


async def test_a_call_under_way_is_cut_off_by_close(broker, communicator):
    broker.responses.append(say_nothing)
    call = asyncio.create_task(communicator.find("rsv-a-1"))
    await until(lambda: bool(broker.seen))
    await communicator.close()
    with pytest.raises(BrokerUnreachable):
        await call


async def test_a_call_after_close_fails_without_a_pause(broker, communicator):
    await communicator.close()
    async with asyncio.timeout(0):
        with pytest.raises(BrokerUnreachable, match="was closed on this side"):
            await communicator.ping()
