"""A request becomes a reservation: once, whatever breaks on the way."""

import pytest
from msgspec.structs import replace

import make
import requesters
from kubelend.agent import resource_requests
from kubelend.core import errors
from kubelend.core.models import ReservationId
from kubelend.wire import route
from requesters import GONE, passed, running
from virtual_time import in_virtual_time


@in_virtual_time
async def test_a_request_is_reserved_and_says_where_and_until_when():
    async with running() as rig:
        key = await rig.create_request(cpu="2")
        status = await rig.status(key)
        assert (status.phase, status.reason, status.target_cluster_id, status.reservation_name) == (
            "Reserved",
            "Locked",
            "p1",
            "rsv-1",
        )
        assert status.message == "Resources reserved in cluster p1"
        assert status.expires_at == make.T0 + make.HOUR
        assert status.last_update_time == make.T0
        assert status.observed_generation == 1
        assert rig.broker.reserved == {"p1": "2 CPU / 1Gi Memory"}


@in_virtual_time
async def test_the_finalizer_and_the_question_are_written_before_the_broker_is_asked():
    async with running() as rig:
        rig.broker.seconds["request"] = 5
        key = await rig.create_request()
        found = await rig.found(key)
        assert found.metadata.finalizers == ("resourcerequest.rear.fluidos.eu/finalizer",)
        assert (found.status.phase, found.status.reason) == ("Pending", "Asking")
        assert found.status.asked is not None
        await passed(5)
        assert (await rig.status(key)).phase == "Reserved"


@in_virtual_time
async def test_finalizers_of_others_stay():
    async with running() as rig:
        rig.broker.trouble = GONE
        key = await rig.create_request()
        found = await rig.found(key)
        others = ("example.com/theirs", *found.metadata.finalizers)
        await rig.objects.apply(replace(found, metadata=replace(found.metadata, finalizers=others)))
        rig.broker.trouble = None
        await passed(5)
        await rig.delete(key)
        assert (await rig.found(key)).metadata.finalizers == ("example.com/theirs",)


@in_virtual_time
async def test_keys_tell_objects_apart_and_stay_the_same_for_one():
    async with running() as rig:
        for name in ("a", "b"):
            await rig.create_request(name)
        await rig.delete("default/a")
        await rig.create_request("a")
        keys = rig.broker.keys
        assert len(keys) == len(set(keys)) == 3
        assert all(len(key) <= route.MAX_KEY_LENGTH for key in keys)
        assert all(key.isascii() and key.isprintable() for key in keys)


@in_virtual_time
async def test_an_agent_that_starts_again_asks_for_nothing_that_is_reserved_or_refused():
    async with running() as first:
        for name, cpu in (("fits", "2"), ("never", "99")):
            await first.create_request(name, cpu=cpu)
        asked = len(first.broker.keys)
    async with running(objects=first.objects, broker=first.broker) as rig:
        await passed(600)
        assert len(rig.broker.keys) == asked == 2
        assert (await rig.status("default/fits")).phase == "Reserved"


@in_virtual_time
async def test_everything_in_the_spec_reaches_the_broker():
    async with running() as rig:
        rig.broker.offers = {"p1": "cpu=8,memory=16Gi,gpu=2,storage=1Ti,example.com/fpga=3"}
        await rig.create_request(
            cpu="1500m",
            requested_gpu="1",
            requested_storage="10Gi",
            extended_resources={"example.com/fpga": "2"},
            priority=7,
            duration="90m",
            wait="5m",
            policy="balanced",
            target_cluster_id="p1",
        )
        (found,) = rig.broker.desk.ledger.reservations.values()
        asked = found.request
        assert asked.resources == make.resources(
            "cpu=1500m,memory=1Gi,gpu=1,storage=10Gi,example.com/fpga=2"
        )
        assert (asked.priority, asked.policy) == (7, "balanced")
        assert (asked.duration, asked.wait) == (90 * make.MINUTE, 5 * make.MINUTE)
        assert asked.constraints.pinned == "p1"


@in_virtual_time
async def test_what_nobody_can_read_fails_without_a_call_and_names_the_field():
    async with running() as rig:
        key = await rig.create_request(cpu="two")
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Failed", "InvalidQuantity")
        assert status.message.startswith("spec.requestedCPU: 'two' is not a quantity")
        assert rig.broker.calls == []
        assert (await rig.found(key)).metadata.finalizers == ()
        await rig.change(key, requested_cpu="2")
        assert (await rig.status(key)).phase == "Reserved"


@in_virtual_time
async def test_a_refusal_is_failed_with_the_reason_and_what_would_help_and_is_not_repeated():
    async with running() as rig:
        key = await rig.create_request(cpu="9")
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Failed", "NoCapacity")
        assert status.message == (
            "no suitable cluster: 0/2 clusters fit: 2 InsufficientCPU; "
            "p1 fits if you request 1 cpu less"
        )
        await passed(3600)
        assert len(rig.broker.keys) == 1


@in_virtual_time
async def test_a_refused_request_is_made_anew_with_another_key_when_its_spec_changes():
    async with running() as rig:
        key = await rig.create_request(cpu="9")
        await rig.change(key, requested_cpu="8")
        status = await rig.status(key)
        assert (status.phase, status.observed_generation) == ("Reserved", 2)
        first, second = rig.broker.keys
        assert first != second


@in_virtual_time
async def test_one_that_waits_in_the_queue_says_so_and_hears_when_it_is_served():
    async with running() as rig:
        await rig.create_request("big", cpu="8", requested_gpu="2")
        key = await rig.create_request("waits", cpu="5", wait="10m")
        status = await rig.status(key)
        assert (status.phase, status.reason, status.reservation_name) == (
            "Pending",
            "Waiting",
            "rsv-2",
        )
        assert status.message.endswith("; queued until 2026-01-01T12:10:00Z")
        assert await rig.instructions() == ["default/rsv-1"]
        await rig.delete("default/big")
        await rig.hear("rsv-2")
        assert (await rig.status(key)).phase == "Reserved"
        assert len(rig.broker.keys) == 2


@in_virtual_time
async def test_one_that_waited_in_vain_fails_with_the_reason_without_being_told():
    async with running() as rig:
        await rig.create_request("big", cpu="8", requested_gpu="2", duration="5h")
        key = await rig.create_request("waits", cpu="5", wait="10m")
        await passed(601)
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Failed", "WaitTimedOut")


@in_virtual_time
async def test_a_spec_that_changes_under_a_live_reservation_changes_nothing_and_says_so():
    async with running() as rig:
        key = await rig.create_request(cpu="2")
        await rig.change(key, requested_cpu="3")
        status = await rig.status(key)
        assert status.phase == "Reserved"
        assert "which has no effect: delete and recreate this object" in status.message
        assert status.observed_generation == 2
        await rig.change(key, requested_cpu="none")
        assert "which has no effect" in (await rig.status(key)).message
        await rig.change(key, requested_cpu="2")
        assert (await rig.status(key)).message == "Resources reserved in cluster p1"
        assert rig.broker.reserved == {"p1": "2 CPU / 1Gi Memory"}
        rig.broker.desk.release(ReservationId("rsv-1"))
        await rig.hear("rsv-1")
        await passed(600)
        assert (await rig.status(key)).phase == "Released"
        assert len(rig.broker.keys) == 1


@in_virtual_time
async def test_a_spec_that_changed_under_one_that_is_over_now_is_still_of_no_effect():
    async with running() as first:
        key = await first.create_request(cpu="2")
        await first.change(key, requested_cpu="3")
        first.broker.desk.release(ReservationId("rsv-1"))
        await first.hear("rsv-1")
        status = await first.status(key)
        assert (status.phase, status.message) == ("Released", "Released by requester me")
    async with running(objects=first.objects, broker=first.broker) as rig:
        assert (await rig.status(key)).phase == "Released"
        assert len(rig.broker.keys) == 1


@in_virtual_time
async def test_an_agent_killed_while_it_changed_its_mind_in_the_queue_asks_anew():
    objects = requesters.TroubledObjects()
    async with running(objects=objects) as first:
        await first.create_request("big", cpu="8", requested_gpu="2")
        key = await first.create_request("waits", cpu="5", wait="10m")
    await first.change(key, requested_cpu="4")
    first.broker.desk.release(ReservationId("rsv-2"))
    objects.trouble = errors.Unavailable("the API server is away")
    async with running(objects=objects, broker=first.broker) as rig:
        await passed(10)
        objects.trouble = None
        await passed(61)
        status = await rig.status(key)
        assert (status.phase, status.reservation_name) == ("Reserved", "rsv-3")


@in_virtual_time
async def test_a_spec_that_changes_while_it_waits_in_the_queue_is_asked_anew():
    async with running() as rig:
        await rig.create_request("big", cpu="8", requested_gpu="2")
        key = await rig.create_request("waits", cpu="5", wait="10m")
        await rig.change(key, requested_cpu="4")
        status = await rig.status(key)
        assert (status.phase, status.reservation_name) == ("Reserved", "rsv-3")
        assert rig.broker.body("rsv-2").status.phase == "Released"
        assert status.observed_generation == 2


@pytest.mark.parametrize("cpu", ["3", "none"])
@in_virtual_time
async def test_a_spec_that_changes_before_the_answer_came_leaves_nothing_of_the_old_behind(cpu):
    async with running() as rig:
        rig.broker.loses_answers = True
        key = await rig.create_request(cpu="2")
        await rig.change(key, requested_cpu=cpu)
        rig.broker.loses_answers = False
        await passed(60)
        status = await rig.status(key)
        if cpu == "none":
            assert (status.phase, status.reason) == ("Failed", "InvalidQuantity")
            assert rig.broker.reserved == {}
        else:
            assert status.phase == "Reserved"
            assert rig.broker.reserved == {"p1": "3 CPU / 1Gi Memory"}


def test_phases_without_anything_to_do_are_those_that_the_object_can_end_in():
    assert {"Failed", "Released", "Expired"} == resource_requests.FINAL_PHASES
