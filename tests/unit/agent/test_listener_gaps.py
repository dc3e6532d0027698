"""After a gap all is settled: with a broker that has begun anew too, and without a flood of questions."""

from asyncio import sleep

import pytest
from structlog.testing import capture_logs

import make
from kubelend.agent import stream
from kubelend.core.errors import BrokerUnreachable, NotReady
from kubelend.core.lifecycle import Phase
from listeners import Rig
from virtual_time import in_virtual_time, settled

GONE = BrokerUnreachable("gone")


def begin_anew(rig):
    """A broker without a store, or one from a backup: its revisions and IDs start over."""
    rig.broker.desk = make.desk(me="cpu=800,memory=800Gi", other="cpu=8,memory=8Gi")


def long_known(rig):
    """One with many revisions behind it, which is in use."""
    found = rig.reserve()
    rig.desk.activate(found)
    for hours in range(2, 20):
        rig.desk.renew(found, hours * make.HOUR)
    return found


# -- a broker that has begun anew


@pytest.mark.parametrize("way", ["stream", "list"])
@in_virtual_time
async def test_a_broker_that_counts_anew_is_believed_after_a_reset(way):
    rig = Rig()
    found = long_known(rig)
    async with rig.running():
        begin_anew(rig)
        assert rig.reserve() == found
        rig.broker.forgets = True
        rig.broker.seconds["instructions"] = 5 if way == "stream" else 0
        rig.broker.cut(GONE)
        await sleep(1)
        if way == "stream":
            rig.broker.tell(found)
            await settled()
        assert rig.reservations.find(found) == rig.broker.body(found)
        assert rig.phase(found) == Phase.RESERVED
        rig.desk.activate(found)
        rig.broker.tell(found)
        await sleep(10)
        assert rig.phase(found) == Phase.ACTIVE
        assert rig.times("find") == []


@in_virtual_time
async def test_a_broker_that_counts_anew_is_believed_by_polls_alone():
    rig = Rig()
    found = long_known(rig)
    async with rig.running():
        rig.broker.stream_trouble = GONE
        rig.broker.cut(GONE)
        begin_anew(rig)
        assert rig.reserve() == found
        await sleep(6)
        assert rig.reservations.find(found) == rig.broker.body(found)
        assert rig.times("find") == []


@in_virtual_time
async def test_what_ended_before_a_broker_began_anew_is_asked_for_and_learnt():
    rig = Rig()
    ended, lost = long_known(rig), rig.reserve()
    async with rig.running():
        begin_anew(rig)
        assert rig.reserve() == ended
        rig.desk.release(ended)
        rig.broker.forgets = True
        rig.broker.cut(GONE)
        await sleep(1)
        assert rig.phase(ended) == Phase.RELEASED
        assert rig.phase(lost) is None


@in_virtual_time
async def test_an_old_answer_that_comes_after_a_reset_takes_nothing_back():
    rig = Rig()
    found = rig.reserve()
    old = rig.broker.body(found)
    async with rig.running():
        rig.desk.activate(found)
        rig.broker.forgets = True
        rig.broker.cut(GONE)
        await sleep(1)
        rig.reservations.put(old)
        assert rig.phase(found) == Phase.ACTIVE


# -- many that are not in the list


def drain_of(rig, count):
    """So many that ended unheard."""
    rig.broker.desk = make.desk(me="cpu=800,memory=800Gi")
    return [rig.reserve() for _ in range(count)]


@in_virtual_time
async def test_many_that_ended_unheard_are_asked_for_some_at_a_time():
    rig = Rig()
    known = drain_of(rig, 250)
    async with rig.running():
        for each in known:
            rig.desk.release(each)
        rig.broker.forgets = True
        rig.broker.cut(GONE)
        await sleep(0.3)
        assert len(rig.broker.named("find")) == stream.MAX_FETCHES_PER_LIST
        await sleep(1)
        assert {rig.phase(each) for each in known} == {Phase.RELEASED}
        await sleep(60)
        assert len(rig.broker.named("find")) == 250
        assert rig.times("instructions") == [0, 0.2, 0.4, 0.6]


@in_virtual_time
async def test_while_there_are_only_polls_the_rest_is_left_to_the_next_of_them():
    rig = Rig()
    known = drain_of(rig, 150)
    async with rig.running():
        for each in known:
            rig.desk.release(each)
        rig.broker.stream_trouble = GONE
        rig.broker.cut(GONE)
        await sleep(6)
        assert len(rig.broker.named("find")) == 100
        await sleep(5)
        assert len(rig.broker.named("find")) == 150
        await sleep(60)
        assert len(rig.broker.named("find")) == 150
        assert {rig.phase(each) for each in known} == {Phase.RELEASED}


# -- contact, and standing


@in_virtual_time
async def test_whoever_waits_is_told_whenever_the_broker_is_heard_again():
    rig = Rig()
    contacts: list[str] = []
    rig.reservations.on_reconnect(lambda: contacts.append("contact"))
    async with rig.running():
        assert len(contacts) == 1
        rig.broker.cut(GONE)
        await sleep(1)
        assert len(contacts) == 1
        rig.broker.tell(rig.reserve())
        rig.broker.tell(rig.reserve())
        await settled()
        assert len(contacts) == 2
        rig.broker.forgets = True
        rig.broker.cut(GONE)
        await sleep(1)
        assert len(contacts) == 3


@in_virtual_time
async def test_a_list_that_cannot_be_read_beside_an_open_stream_is_a_partial_problem_told_once():
    rig = Rig()
    rig.broker.trouble = NotReady("replaying")
    with capture_logs() as lines:
        async with rig.running():
            await sleep(10)
            rig.broker.trouble = NotReady("replaying still")
            rig.broker.tell(rig.reserve())
            await sleep(10)
            assert rig.health.errors == {
                "stream": "cannot list instructions after a gap: replaying"
            }
            assert rig.health.not_ready_reason == ""
            assert rig.listener.is_connected
            rig.broker.trouble = None
            await sleep(60)
            assert rig.health.errors == {}
    assert [line["event"] for line in lines if "component" in line] == [
        "Component unhealthy",
        "Component healthy",
    ]


@in_virtual_time
async def test_a_stream_that_breaks_while_the_list_cannot_be_read_is_told_as_such():
    rig = Rig()
    rig.broker.trouble = NotReady("replaying")
    async with rig.running():
        await sleep(1)
        rig.broker.stream_trouble = GONE
        rig.broker.cut(GONE)
        await sleep(20)
        assert rig.health.not_ready_reason == "stream: gone"
