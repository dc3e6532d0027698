"""Nothing that the broker says is missed for long, whatever becomes of the stream."""

from asyncio import get_running_loop, sleep
from datetime import timedelta
from itertools import pairwise

import pytest

from kubelend.agent import stream
from kubelend.core.errors import BrokerUnreachable, LimitExceeded, NotReady
from kubelend.core.lifecycle import Phase
from listeners import Rig
from virtual_time import in_virtual_time, settled

GONE = BrokerUnreachable("gone")


@in_virtual_time
async def test_what_the_stream_says_is_known_at_once():
    rig = Rig()
    async with rig.running():
        found = rig.reserve()
        rig.broker.tell(found)
        await settled()
        assert rig.phase(found) == Phase.RESERVED


@in_virtual_time
async def test_what_was_there_before_is_read_when_the_stream_opens():
    rig = Rig()
    found = rig.reserve()
    async with rig.running():
        assert rig.phase(found) == Phase.RESERVED
        assert rig.listener.is_connected


@in_virtual_time
async def test_no_poll_happens_while_the_stream_is_open():
    rig = Rig()
    async with rig.running():
        await sleep(3600)
        assert rig.times("instructions") == [0]
        assert rig.times("stream") == [0]


@in_virtual_time
async def test_duplicates_and_older_words_change_nothing():
    rig = Rig()
    async with rig.running():
        found = rig.reserve()
        reserved = rig.broker.body(found)
        rig.desk.release(found)
        for body in [rig.broker.body(found), reserved, rig.broker.body(found), reserved]:
            rig.broker.say(body)
        await settled()
        assert rig.phase(found) == Phase.RELEASED
        assert rig.heard == [found]


@in_virtual_time
async def test_a_list_that_is_older_than_the_stream_takes_nothing_back():
    rig = Rig()
    rig.broker.seconds["instructions"] = 2
    async with rig.running():
        found = rig.reserve()  # the list is on its way, without it
        rig.broker.tell(found)
        await sleep(3)
        assert rig.phase(found) == Phase.RESERVED
        assert rig.times("find") == []


@in_virtual_time
async def test_what_ended_unheard_is_asked_for_and_learnt():
    rig = Rig()
    ended, archived, open_still = rig.reserve(), rig.reserve(), rig.reserve()
    async with rig.running():
        rig.desk.release(ended)
        rig.broker.forget(archived)
        rig.broker.forgets = True
        rig.broker.cut(GONE)
        await sleep(1)
        assert rig.phase(ended) == Phase.RELEASED
        assert rig.phase(archived) is None
        assert rig.phase(open_still) == Phase.RESERVED
        assert {call.reservation for call in rig.broker.named("find")} == {ended, archived}


# -- broken streams


@in_virtual_time
async def test_a_broken_stream_is_opened_again_ever_more_slowly():
    rig = Rig()
    async with rig.running():
        rig.broker.stream_trouble = GONE
        rig.broker.cut(GONE)
        await sleep(100)
        tries = rig.times("stream")
        pauses = [round(late - early, 3) for early, late in pairwise(tries)]
        assert pauses[:9] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]


@in_virtual_time
async def test_chance_keeps_agents_out_of_step():
    rig = Rig(chance=1.0)
    rig.broker.stream_trouble = GONE
    async with rig.running():
        await sleep(4.5)
        assert rig.times("stream")[:3] == [0, 0.1, 0.3]
        assert rig.times("instructions") == [4]


@pytest.mark.parametrize("lives", ["long", "talking"])
@in_virtual_time
async def test_a_stream_that_was_good_is_opened_again_at_once(lives):
    rig = Rig()
    rig.broker.stream_trouble = GONE
    async with rig.running():
        await sleep(10)
        rig.broker.stream_trouble = None
        await sleep(10)  # it is open again
        if lives == "long":
            await sleep(stream.CONNECTED_AFTER.total_seconds())
        else:
            rig.broker.tell(rig.reserve())
            await settled()
        rig.broker.cut(GONE)
        cut_at = get_running_loop().time()
        await sleep(0.3)
        assert rig.times("stream")[-1] == pytest.approx(cut_at + 0.2)


@in_virtual_time
async def test_a_stream_that_dies_at_once_though_it_opens_is_not_hammered():
    rig = Rig()
    rig.broker.forgets = True
    async with rig.running():
        for _ in range(200):
            if rig.listener.is_connected:
                rig.broker.cut(GONE)
            await sleep(0.1)
        assert len(rig.times("stream")) < 12


@in_virtual_time
async def test_a_stream_that_ends_without_a_word_is_opened_again():
    rig = Rig()
    async with rig.running():
        rig.broker.cut(None)
        await sleep(0.3)
        assert rig.times("stream") == [0, 0.2]


@in_virtual_time
async def test_a_broker_that_says_when_to_come_back_is_heeded():
    rig = Rig()
    rig.broker.stream_trouble = LimitExceeded("16 streams open", retry_after=15)
    async with rig.running():
        await sleep(31)
        assert rig.times("stream") == [0, 15, 30]


# -- polls


@in_virtual_time
async def test_while_the_stream_is_down_the_list_is_read_every_five_seconds():
    rig = Rig()
    async with rig.running():
        rig.broker.stream_trouble = GONE
        rig.broker.cut(GONE)
        found = rig.reserve()
        await sleep(21)
        assert rig.times("instructions") == [0, 5, 10, 15, 20]
        assert rig.phase(found) == Phase.RESERVED


@in_virtual_time
async def test_polls_that_fail_go_on_at_their_pace():
    rig = Rig()
    rig.broker.stream_trouble, rig.broker.trouble = GONE, GONE
    async with rig.running():
        await sleep(11)
        assert rig.times("instructions") == [5, 10]


@in_virtual_time
async def test_polls_can_be_turned_off():
    rig = Rig(poll_every=timedelta())
    rig.broker.stream_trouble = GONE
    async with rig.running():
        await sleep(600)
        assert rig.times("instructions") == []


@in_virtual_time
async def test_a_poll_that_hangs_is_given_up_and_keeps_no_stream_waiting():
    rig = Rig()
    rig.broker.stream_trouble = GONE
    rig.broker.seconds["instructions"] = 10_000
    async with rig.running():
        await sleep(6)  # the poll hangs
        rig.broker.stream_trouble = None
        await sleep(3)
        found = rig.reserve()
        rig.broker.tell(found)
        await settled()
        assert rig.phase(found) == Phase.RESERVED
        await sleep(20)
        assert len(rig.times("instructions")) > 1, "the first poll was never given up"


@in_virtual_time
async def test_after_a_gap_the_list_is_read_until_that_works():
    rig = Rig()
    rig.broker.trouble = NotReady("replaying")
    found = rig.reserve()
    async with rig.running():
        await sleep(2)
        assert rig.times("instructions") == [0, 0.2, 0.6, 1.4]
        rig.broker.trouble = None
        await sleep(2)
        assert rig.phase(found) == Phase.RESERVED
        await sleep(100)
        assert rig.times("instructions") == [0, 0.2, 0.6, 1.4, 3.0]


@in_virtual_time
async def test_a_gap_that_could_not_be_read_is_left_to_the_polls_once_the_stream_is_down():
    rig = Rig()
    rig.broker.trouble = NotReady("replaying")
    async with rig.running():
        rig.broker.stream_trouble = GONE
        rig.broker.cut(GONE)
        await sleep(11)
        assert rig.times("instructions") == [0, 0.2, 5.2, 10.2]


@in_virtual_time
async def test_a_reset_while_the_list_is_read_has_it_read_again():
    rig = Rig()
    rig.broker.forgets = True
    rig.broker.seconds["instructions"] = 3
    async with rig.running():
        found = rig.reserve()
        rig.broker.cut(GONE)
        await sleep(7)
        assert rig.times("instructions") == [0, 3]
        assert rig.phase(found) == Phase.RESERVED
