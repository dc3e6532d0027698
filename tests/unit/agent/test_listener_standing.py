"""Whether instructions come is known and told, once for each change; and refusals are not hammered."""

from asyncio import sleep
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    IdentityInUse,
    Revoked,
    UnexpectedAnswer,
)
from listeners import Rig
from make import SECOND
from virtual_time import in_virtual_time, settled

GONE = BrokerUnreachable("gone")


@in_virtual_time
async def test_one_line_says_that_it_is_down_and_one_that_it_is_up():
    rig = Rig()
    async with rig.running():
        with capture_logs() as lines:
            for number in range(100):
                rig.broker.stream_trouble = BrokerUnreachable(f"try {number}")
                rig.broker.trouble = rig.broker.stream_trouble
                if number == 0:
                    rig.broker.cut(rig.broker.stream_trouble)
                await sleep(36)
            assert rig.health.errors == {"stream": "try 0"}
            rig.broker.stream_trouble = rig.broker.trouble = None
            await sleep(40)
        assert rig.listener.is_connected
        assert [(line["event"], line.get("error"), line.get("outage")) for line in lines] == [
            ("Broker stream disconnected, polling every 5s", "try 0", None),
            ("Broker stream reconnected", None, "1h0m25s"),
        ]


@in_virtual_time
async def test_a_stream_that_goes_on_where_it_was_counts_as_open_once_the_broker_answers():
    rig = Rig()
    async with rig.running():
        rig.broker.cut(GONE)
        await sleep(4)
        assert rig.health.errors  # it said nothing yet
        await sleep(100)
        assert rig.listener.is_connected
        assert rig.times("instructions") == [0, 5]


@in_virtual_time
async def test_a_stream_that_goes_on_and_says_something_is_open_without_a_poll():
    rig = Rig()
    async with rig.running():
        rig.broker.cut(GONE)
        await sleep(1)
        assert rig.health.errors
        rig.broker.tell(rig.reserve())
        await settled()
        assert rig.listener.is_connected
        assert not rig.health.errors
        await sleep(60)
        assert rig.times("instructions") == [0]


@in_virtual_time
async def test_a_stream_that_is_silent_while_no_poll_is_answered_is_not_called_open():
    rig = Rig()
    async with rig.running():
        rig.broker.cut(GONE)
        rig.broker.trouble = GONE
        await sleep(600)
        assert rig.health.errors == {"stream": "gone"}


@in_virtual_time
async def test_without_polls_a_stream_that_stays_counts_as_open():
    rig = Rig(poll_every=timedelta())
    async with rig.running():
        rig.broker.cut(GONE)
        await sleep(29)
        assert rig.health.errors
        await sleep(2)
        assert rig.listener.is_connected
        assert not rig.health.errors


@in_virtual_time
async def test_an_answer_to_a_poll_does_not_make_a_broken_stream_an_open_one():
    rig = Rig()
    async with rig.running():
        rig.broker.stream_trouble = GONE
        rig.broker.cut(GONE)
        await sleep(60)
        assert not rig.listener.is_connected


@pytest.mark.parametrize(
    "refusal",
    [Forbidden("no"), Revoked("no more"), UnexpectedAnswer("what?")],
    ids=lambda error: error.code,
)
@in_virtual_time
async def test_what_will_not_be_better_by_itself_is_reported_and_tried_slowly(refusal):
    rig = Rig()
    rig.broker.stream_trouble = rig.broker.trouble = refusal
    async with rig.running():
        assert rig.health.errors == {"stream": f"{refusal}"}
        await sleep(91)
        assert rig.times("stream") == [0, 30, 60, 90]
        assert rig.times("instructions") == [30, 60, 90]


@in_virtual_time
async def test_the_place_of_another_agent_is_tried_for_every_two_seconds_and_not_read_along():
    rig = Rig()
    rig.broker.stream_trouble = rig.broker.trouble = IdentityInUse("twice")
    async with rig.running():
        await sleep(8)
        assert rig.times("stream") == pytest.approx([0, 0.2, 0.6, 1.4, 3, 5, 7])
        assert rig.times("instructions") == []


@in_virtual_time
async def test_a_refusal_after_mere_absence_is_reported_too():
    rig = Rig()
    rig.broker.stream_trouble = GONE
    async with rig.running():
        rig.broker.stream_trouble = Revoked("not believed")
        await sleep(SECOND.total_seconds())
        assert rig.health.errors == {"stream": "not believed"}


@in_virtual_time
async def test_it_counts_as_begun_only_once_the_broker_was_heard():
    rig = Rig()
    rig.health.require("stream")
    assert rig.health.not_ready_reason == "stream: starting"
    async with rig.running():
        assert rig.health.not_ready_reason == ""
