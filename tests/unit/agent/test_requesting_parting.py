"""A ResourceRequest goes when nothing is held for it, and takes nothing along."""

import pytest
from msgspec.structs import replace

import requesters
from kubelend.core import errors
from kubelend.core.models import ReservationId
from kubelend.wire.objects import ResourceRequest
from requesters import GONE, passed, running
from virtual_time import in_virtual_time

HELD = {"p1": "1 CPU / 1Gi Memory"}


@in_virtual_time
async def test_deletion_gives_back_and_only_then_lets_go():
    async with running() as rig:
        key = await rig.create_request()
        rig.broker.seconds["release"] = 5
        await rig.delete(key)
        assert await rig.is_there(key)
        await passed(5)
        assert not await rig.is_there(key)
        assert rig.broker.reserved == {}
        await passed(3600)
        assert len(rig.broker.named("release")) == 1


@in_virtual_time
async def test_while_the_broker_is_away_it_stays_says_so_and_is_tried_again():
    async with running() as rig:
        key = await rig.create_request()
        rig.broker.trouble = GONE
        rig.broker.calls.clear()
        await rig.delete(key)
        status = await rig.status(key)
        assert status.reason == "BrokerUnreachable"
        assert status.message == "Deletion waits until the reservation is released: nobody answers"
        writes = await rig.writes(key)
        await passed(1800)
        assert await rig.writes(key) == writes
        rig.broker.trouble = None
        await passed(61)
        assert not await rig.is_there(key)
        assert rig.broker.reserved == {}


@pytest.mark.parametrize("cpu", ["1", "99", "none"], ids=["expired", "refused", "unreadable"])
@in_virtual_time
async def test_one_that_holds_nothing_goes_at_once_without_a_call(cpu):
    async with running() as rig:
        key = await rig.create_request(cpu=cpu)
        await passed(3700)
        rig.broker.calls.clear()
        await rig.delete(key)
        assert not await rig.is_there(key)
        await passed(60)
        assert rig.broker.calls == []


@in_virtual_time
async def test_one_that_is_over_by_the_brokers_word_needs_no_call():
    async with running() as rig:
        key = await rig.create_request()
        rig.broker.desk.release(ReservationId("rsv-1"))
        await rig.hear("rsv-1")
        await rig.delete(key)
        assert not await rig.is_there(key)
        assert rig.broker.named("release") == []


@in_virtual_time
async def test_one_that_the_broker_does_not_know_goes():
    async with running() as rig:
        key = await rig.create_request()
        rig.broker.forget("rsv-1")
        await rig.delete(key)
        assert not await rig.is_there(key)
        assert (await rig.instruction("default/rsv-1")).status.phase == "Finished"


@in_virtual_time
async def test_one_that_may_not_be_given_back_goes_and_is_left_to_expire():
    async with running() as rig:
        key = await rig.create_request()
        rig.broker.trouble = errors.Revoked("this certificate is revoked")
        await rig.delete(key)
        assert not await rig.is_there(key)


@in_virtual_time
async def test_one_that_waits_in_the_queue_leaves_it():
    async with running() as rig:
        await rig.create_request("big", cpu="8", requested_gpu="2")
        key = await rig.create_request("waits", cpu="5", wait="10m")
        await rig.delete(key)
        assert not await rig.is_there(key)
        assert rig.broker.desk.waiting() == []


@in_virtual_time
async def test_one_whose_answer_was_lost_gives_back_what_it_never_heard_of():
    async with running() as rig:
        rig.broker.loses_answers = True
        key = await rig.create_request()
        await rig.delete(key)
        assert rig.broker.reserved == HELD
        assert await rig.is_there(key)
        rig.broker.loses_answers = False
        await passed(61)
        assert not await rig.is_there(key)
        assert rig.broker.reserved == {}
        assert len(rig.broker.desk.ledger.reservations) == 1


@in_virtual_time
async def test_one_deleted_while_the_agent_was_dead_gives_back_what_it_never_heard_of():
    async with running() as killed:
        killed.broker.takes_after = 5
        key = await killed.create_request()
        await passed(1)
    killed.broker.takes_after = 0
    await killed.delete(key)
    assert killed.broker.reserved == HELD
    async with running(objects=killed.objects, broker=killed.broker) as rig:
        assert not await rig.is_there(key)
        assert rig.broker.reserved == {}
        assert len(rig.broker.desk.ledger.reservations) == 1


@in_virtual_time
async def test_one_whose_question_would_be_refused_now_goes():
    async with running() as rig:
        rig.broker.trouble = GONE
        key = await rig.create_request(cpu="99")
        await rig.delete(key)
        assert await rig.is_there(key)
        rig.broker.trouble = None
        rig.broker.keys.clear()
        await passed(600)
        assert not await rig.is_there(key)
        assert len(rig.broker.keys) == 1


@in_virtual_time
async def test_one_deleted_in_the_middle_of_the_question_goes_after_the_answer():
    async with running() as rig:
        rig.broker.takes_after = 5
        key = await rig.create_request()
        await rig.delete(key)
        rig.broker.takes_after = 0
        await passed(10)
        assert not await rig.is_there(key)
        assert rig.broker.reserved == {}


@in_virtual_time
async def test_one_that_somebody_frees_of_our_finalizer_is_given_back_all_the_same():
    async with running() as rig:
        key = await rig.create_request()
        found = await rig.found(key)
        freed = replace(found, metadata=replace(found.metadata, finalizers=()))
        await rig.objects.apply(freed)
        await rig.delete(key)
        assert not await rig.is_there(key)
        assert rig.broker.reserved == {}
        await passed(3600)
        assert len(rig.broker.named("release")) == 1


@in_virtual_time
async def test_one_made_anew_under_the_same_name_does_not_inherit():
    async with running() as rig:
        rig.broker.trouble = GONE
        key = await rig.create_request(cpu="2")
        found = await rig.found(key)
        await rig.objects.apply(replace(found, metadata=replace(found.metadata, finalizers=())))
        await rig.objects.delete(ResourceRequest, key)
        await rig.create_request(cpu="1")
        rig.broker.trouble = None
        await passed(61)
        assert (await rig.status(key)).phase == "Reserved"
        assert rig.broker.reserved == HELD
        await rig.change(key, renew=True)
        assert len(rig.broker.named("release")) == 1


@in_virtual_time
async def test_a_finalizer_that_cannot_be_removed_is_tried_again():
    objects = requesters.TroubledObjects()
    async with running(objects=objects) as rig:
        key = await rig.create_request()
        objects.trouble = errors.Unavailable("the API server is away")
        await rig.delete(key)
        await passed(60)
        assert await rig.is_there(key)
        assert rig.broker.reserved == {}
        objects.trouble = None
        await passed(61)
        assert not await rig.is_there(key)
        assert len(rig.broker.named("release")) == 1


@in_virtual_time
async def test_nothing_is_asked_for_one_that_is_to_go_already():
    rig = requesters.Rig()
    spec_of_others = ("example.com/theirs",)
    key = await rig.create_request()
    found = await rig.found(key)
    held = replace(found, metadata=replace(found.metadata, finalizers=spec_of_others))
    await rig.objects.apply(held)
    await rig.delete(key)
    async with running(objects=rig.objects, broker=rig.broker):
        await passed(60)
        assert rig.broker.calls == []
        assert (await rig.found(key)).metadata.finalizers == spec_of_others
