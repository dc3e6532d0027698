"""Whatever breaks while a request is made: nothing is taken twice, and what may pass is waited out."""

import asyncio

import pytest

import requesters
from kubelend.core import errors
from requesters import GONE, passed, running
from virtual_time import in_virtual_time, settled, stopped


@in_virtual_time
async def test_an_answer_that_was_lost_takes_nothing_twice():
    async with running() as rig:
        rig.broker.loses_answers = True
        key = await rig.create_request(cpu="2")
        assert (await rig.status(key)).phase == "Pending"
        rig.broker.loses_answers = False
        await passed(10)
        assert (await rig.status(key)).reservation_name == "rsv-1"
        assert len(rig.broker.keys) > 1
        assert len(set(rig.broker.keys)) == 1
        assert rig.broker.reserved == {"p1": "2 CPU / 1Gi Memory"}


@in_virtual_time
async def test_an_agent_killed_between_the_answer_and_the_write_takes_nothing_twice():
    async with running() as killed:
        killed.broker.takes_after = 5
        key = await killed.create_request(cpu="2")
        await passed(1)
        assert killed.broker.reserved == {"p1": "2 CPU / 1Gi Memory"}
    killed.broker.takes_after = 0
    async with running(objects=killed.objects, broker=killed.broker) as rig:
        status = await rig.status(key)
        assert (status.phase, status.reservation_name) == ("Reserved", "rsv-1")
        assert rig.broker.reserved == {"p1": "2 CPU / 1Gi Memory"}
        assert len(set(rig.broker.keys)) == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.Forbidden("not you"),
        errors.QuotaExceeded("no more than 3 CPU"),
        errors.InvalidInput("duration: too long"),
        errors.BodyTooLarge("too large"),
        errors.KeyReused("was used"),
    ],
    ids=lambda error: error.code,
)
@in_virtual_time
async def test_what_will_not_be_better_fails(error):
    async with running() as rig:
        rig.broker.trouble = error
        key = await rig.create_request()
        status = await rig.status(key)
        assert (status.phase, status.reason, status.message) == ("Failed", error.code, str(error))
        await passed(3600)
        assert len(rig.broker.keys) == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.BrokerUnreachable("nobody answers"),
        errors.StoreFailed("disk full"),
        errors.NotReady("starting"),
        errors.QueueFull("1000 wait"),
        errors.IdentityInUse("another agent"),
        errors.UnexpectedAnswer("the broker answered 502: Bad Gateway"),
        errors.KubelendError("internal error"),
        errors.Conflict("rsv-1 exists already"),
    ],
    ids=lambda error: error.code,
)
@in_virtual_time
async def test_what_may_be_better_later_is_pending_until_it_is(error):
    async with running() as rig:
        rig.broker.trouble = error
        key = await rig.create_request()
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Pending", error.code)
        assert str(error) in status.message
        await passed(3 * 3600)
        assert (await rig.status(key)).phase == "Pending"
        rig.broker.trouble = None
        await passed(61)
        assert (await rig.status(key)).phase == "Reserved"


@in_virtual_time
async def test_tries_become_rare_and_the_status_is_written_once_and_not_at_each():
    async with running() as rig:
        rig.broker.trouble = GONE
        key = await rig.create_request()
        writes = await rig.writes(key)
        await passed(3600)
        assert await rig.writes(key) == writes
        times = [call.at for call in rig.broker.named("request")]
        assert times[:5] == [0, 0.5, 1.5, 3.5, 7.5]
        assert times[-1] - times[-2] == 60


@in_virtual_time
async def test_after_a_success_the_first_pause_is_short_again():
    async with running() as rig:
        rig.broker.trouble = GONE
        key = await rig.create_request()
        await passed(600)
        rig.broker.trouble = None
        await passed(61)
        rig.broker.trouble = GONE
        began = asyncio.get_running_loop().time()
        await rig.delete(key)
        await passed(3)
        assert [call.at - began for call in rig.broker.named("release")] == [0, 0.5, 1.5]


@in_virtual_time
async def test_a_broker_that_wants_to_be_left_in_peace_is():
    async with running() as rig:
        rig.broker.trouble = errors.RateLimited("too many", retry_after=100)
        await rig.create_request()
        await passed(250)
        assert [call.at for call in rig.broker.named("request")] == [0, 100, 200]


@in_virtual_time
async def test_objects_that_cannot_be_written_are_tried_again_and_nothing_is_asked_twice():
    objects = requesters.TroubledObjects()
    async with running(objects=objects) as rig:
        rig.broker.seconds["request"] = 1
        key = await rig.create_request()
        objects.trouble = errors.Conflict("it is another one now")
        await passed(30)
        assert (await rig.status(key)).phase == "Pending"
        objects.trouble = None
        await passed(61)
        assert (await rig.status(key)).reservation_name == "rsv-1"
        assert rig.broker.reserved == {"p1": "1 CPU / 1Gi Memory"}


@in_virtual_time
async def test_nothing_is_asked_before_the_question_is_written_down():
    objects = requesters.TroubledObjects()
    await requesters.Rig(objects=objects).create_request()
    objects.trouble = errors.Unavailable("read only")
    async with running(objects=objects) as rig:
        await passed(600)
        assert rig.broker.calls == []
        objects.trouble = None
        await passed(61)
        assert (await rig.status("default/w")).phase == "Reserved"


@in_virtual_time
async def test_one_slow_answer_does_not_hold_up_the_others():
    async with running() as rig:
        rig.broker.takes_after = 1000
        await rig.create_request("slow")
        rig.broker.takes_after = 0
        key = await rig.create_request("quick")
        assert (await rig.status(key)).phase == "Reserved"
        await passed(1000)


@in_virtual_time
async def test_a_mistake_in_the_code_ends_the_task_with_it():
    rig = requesters.Rig()
    task = asyncio.create_task(rig.requester.run())
    await settled()
    rig.broker.trouble = ZeroDivisionError("a mistake")  # type: ignore[assignment]
    await rig.create_request()
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        await task


@in_virtual_time
async def test_objects_that_cannot_be_watched_are_a_trouble_of_the_whole_and_are_watched_again():
    class Blind(requesters.TroubledObjects):
        def watch(self, kind):
            self._fail()
            return super().watch(kind)

    objects = Blind()
    objects.trouble = errors.Unavailable("the API server is away")
    rig = requesters.Rig(objects=objects)
    task = asyncio.create_task(rig.requester.run())
    await passed(100)
    assert "cannot watch resourcerequests: the API server is away" in rig.health.not_ready_reason
    objects.trouble = None
    await passed(31)
    assert rig.health.errors == {}
    key = await rig.create_request()
    assert (await rig.status(key)).phase == "Reserved"
    await stopped(task)


@in_virtual_time
async def test_a_single_request_in_trouble_is_no_trouble_of_the_whole():
    async with running() as rig:
        rig.broker.trouble = GONE
        await rig.create_request()
        await passed(60)
        assert rig.health.errors == {}
