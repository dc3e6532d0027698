"""Streams of instructions: parsed however they are cut, resumed from where they were, and not for ever."""

import contextlib
import itertools
from datetime import timedelta

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import make
from kubelend.core.errors import BrokerUnreachable, Forbidden, NotReady, UnexpectedResponse
from kubelend.transports import session
from kubelend.transports.session import EventStreamParser, ServerSentEvent
from kubelend.wire import bodies
from scripted_broker import events, hang_up, problem

AMOUNTS, STATUS = bodies.Quantities("1", "1Gi"), bodies.ReservationStatus("Reserved", "Locked")
RESERVATION = bodies.Reservation("rsv-a-1", "a", "b", AMOUNTS, STATUS, make.T0)

pytestmark = pytest.mark.broker("scripted")


def event(revision, name="instruction"):
    instruction = bodies.Instruction(revision, "provider", "Hold", "Hold it", RESERVATION)
    content = msgspec.json.encode(instruction)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (revision, name.encode(), content)


async def read(stream, count):
    """The revisions of the next instructions."""
    found = []
    async with contextlib.aclosing(stream):
        async for instruction in stream:
            found.append(instruction.revision)
            if len(found) == count:
                break
    return found


async def test_instructions_come_as_bodies_without_keepalives(broker, client):
    broker.responses.append(events(b": open\n\n" + event(1) + b": alive\n\n" + event(2), stay=True))
    assert await read(client.stream(), 2) == [1, 2]
    assert "Last-Event-ID" not in broker.seen[0].headers
    assert broker.seen[0].headers["Accept"] == "text/event-stream"


async def test_a_cut_stream_goes_on_after_the_last_event(broker, client):
    broker.responses += [events(event(1) + event(2)), hang_up, events(event(3), stay=True)]
    assert await read(client.stream(after="0"), 3) == [1, 2, 3]
    resumed = [seen.headers["Last-Event-ID"] for seen in broker.seen]
    assert resumed[0] == "0"
    assert set(resumed[1:]) == {"2"}


async def test_an_event_that_was_cut_in_half_is_not_taken(broker, client):
    half = event(2)[:-10]
    broker.responses += [events(event(1) + half), events(event(2), stay=True)]
    assert await read(client.stream(), 2) == [1, 2]


async def test_the_caller_is_notified_of_a_reset(broker, client):
    resets = []
    beginning = b'id: 5\nevent: reset\ndata: {"revision":5}\n\n'
    broker.responses += [events(beginning), events(event(6), stay=True)]
    stream = client.stream(after="1", on_reset=lambda: resets.append("reset"))
    assert await read(stream, 1) == [6]
    assert resets == ["reset"]
    assert broker.seen[1].headers["Last-Event-ID"] == "5"


async def test_after_a_reset_without_an_id_the_stream_is_not_resumed_behind_an_older_one(
    broker, client
):
    """A broker that lost its store counts from the start, and may never come to the old number."""
    broker.responses += [events(event(7)), events(b"event: reset\ndata: {}\n\n")]
    broker.responses += [events(event(2), stay=True)]
    assert await read(client.stream(), 2) == [7, 2]
    resumed = [seen.headers.get("Last-Event-ID", "") for seen in broker.seen]
    assert resumed == ["", "7", ""]


async def test_events_of_a_later_version_are_passed_over(broker, client):
    broker.responses.append(events(event(1, name="weather") + event(2), stay=True))
    assert await read(client.stream(), 1) == [2]


@pytest.mark.parametrize(
    "answer, error, message, calls",
    [
        (problem(NotReady("starting")), NotReady, "starting", 3),
        (events(b": open\n\n"), BrokerUnreachable, "the broker ended the stream", 3),
        (problem(Forbidden("not for a viewer")), Forbidden, "not for a viewer", 1),
    ],
    ids=["not ready", "ends at once", "refused"],
)
async def test_connecting_again_has_an_end(broker, client, answer, error, message, calls):
    broker.responses.append(answer)
    with pytest.raises(error, match=message):
        await read(client.stream(), 1)
    assert len(broker.seen) == calls


async def test_an_event_gives_all_retries_back(broker, client):
    broker.responses += [events(event(n)) for n in range(1, 10)]
    assert await read(client.stream(), 9) == list(range(1, 10))


async def test_a_silent_stream_is_dead(broker, client):
    broker.responses += [events(event(1), stay=True), events(event(2), stay=True)]
    assert await read(client.stream(read_timeout=timedelta(milliseconds=100)), 2) == [1, 2]


async def test_what_is_no_instruction_is_unexpected(broker, client):
    broker.responses.append(events(b"event: instruction\ndata: {}\n\n", stay=True))
    with pytest.raises(UnexpectedResponse):
        await read(client.stream(), 1)


STREAM = (
    b": open\n\n"
    b'id: 7\nevent: instruction\ndata: {"a":\ndata: 1}\n\n'
    b": alive\n\n"
    b"retry: 10\r\nevent: other\r\ndata:x\r\n\r\n"
    b"event: nothing\n\n"
    b"data: caf\xc3\xa9\nid: 8\n\n"
)

ENDS = [STREAM.index(last) + len(last) for last in (b"1}\n\n", b"x\r\n\r\n", b"id: 8\n\n")]
EVENTS = [
    ServerSentEvent('{"a":\n1}', "7", "instruction"),
    ServerSentEvent("x", "7", "other"),
    ServerSentEvent("café", "8", ""),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
@example([])
def test_events_are_parsed_however_the_stream_is_cut(cuts):
    parser, found = EventStreamParser(), []
    places = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(places):
        found += parser.feed(STREAM[start:end])
        assert len(found) == sum(end >= done for done in ENDS)
    assert found == EVENTS


@pytest.mark.parametrize(
    "chunk", [b"x" * 1024, b"data: " + b"x" * 1018 + b"\n"], ids=["one line", "many lines"]
)
def test_an_event_without_an_end_does_not_fill_the_memory(chunk):
    parser, count = EventStreamParser(), session.MAX_EVENT_BYTES // len(chunk)
    assert all(parser.feed(chunk) == [] for _ in range(count))
    with pytest.raises(UnexpectedResponse, match="oversized event"):
        parser.feed(chunk * 8)
