"""Server-sent events are found however the stream is cut, and nothing else is."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.core.errors import UnexpectedAnswer
from kubelend.transports import session
from kubelend.transports.session import EventStreamParser, ServerSentEvent

STREAM = (
    b": open\n\n"
    b'id: 7\nevent: instruction\ndata: {"a":\ndata: 1}\n\n'
    b": alive\n\n"
    b"retry: 10\r\nevent: other\r\ndata:x\r\n\r\n"
    b"event: nothing\n\n"
    b"data: caf\xc3\xa9\nid: 8\n\n"
)
EVENTS = [
    ServerSentEvent('{"a":\n1}', "7", "instruction"),
    ServerSentEvent("x", "7", "other"),
    ServerSentEvent("café", "8", ""),
]


def test_events_are_found_and_comments_are_not():
    assert EventStreamParser().feed(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_it_does_not_matter_how_the_stream_is_cut(cuts):
    parser, found = EventStreamParser(), []
    places = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(places):
        found += parser.feed(STREAM[start:end])
    assert found == EVENTS


def test_an_event_is_none_before_its_end():
    parser = EventStreamParser()
    assert parser.feed(b"data: half") == []
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\n") == [ServerSentEvent("half")]


@pytest.mark.parametrize(
    "chunk", [b"x" * 1024, b"data: " + b"x" * 1018 + b"\n"], ids=["one line", "many lines"]
)
def test_an_event_without_an_end_does_not_fill_the_memory(chunk):
    parser, count = EventStreamParser(), session.MAX_EVENT_BYTES // len(chunk)
    assert all(parser.feed(chunk) == [] for _ in range(count))
    with pytest.raises(UnexpectedAnswer, match="oversized event"):
        parser.feed(chunk * 8)
