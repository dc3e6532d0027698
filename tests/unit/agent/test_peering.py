"""Clusters are joined while a reservation lives and parted when it is over, whatever breaks in between."""

import pytest
from msgspec.structs import replace

from joiners import Rig, passed, running
from kubelend.agent import instructions
from kubelend.agent.peering import PEERING_FINALIZER
from kubelend.core.errors import BrokerUnreachable, Unavailable
from virtual_time import in_virtual_time, settled

DOWN = Unavailable("liqoctl peer failed: no route to host")


# -- joining


@in_virtual_time
async def test_a_reservation_is_joined_sized_ready_and_activated_once():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one")
        status = await rig.status(key)
        assert (status.phase, status.message) == ("Ready", "all is well")
        assert status.peered_cluster_ids == ("one",)
        assert rig.peering.joined == {("rsv-1", "one")}
        assert rig.peering.sizes == {"rsv-1": "500m CPU / 1Gi Memory / 2 GPU"}
        assert rig.broker.activated == ["rsv-1"]
        assert rig.known("rsv-1").status.phase == "Active"
        await passed(600)
        assert rig.broker.activated == ["rsv-1"]
        assert rig.problem == ""


@in_virtual_time
async def test_it_is_written_down_before_anything_is_built():
    async with running() as rig:
        rig.peering.seconds["connect"] = 60
        key = await rig.instruct("rsv-1", "one")
        found = await rig.found(key)
        assert found.metadata.finalizers == (PEERING_FINALIZER,)
        assert (found.status.phase, found.status.message) == ("Connecting", "connecting to one")
        assert found.status.peered_cluster_ids == ("one",)
        assert rig.peering.joined == set()


@in_virtual_time
async def test_readiness_is_asked_for_until_it_comes_and_the_reason_is_told():
    async with running() as rig:
        rig.peering.unready["rsv-1"] = "there is no virtual node yet"
        key = await rig.instruct("rsv-1", "one")
        await passed(60)
        status = await rig.status(key)
        assert (status.phase, status.message) == ("Connecting", "there is no virtual node yet")
        assert (rig.broker.activated, rig.problem) == ([], "")
        # Half a second, then twice as long each time up to ten.
        assert rig.peering.count("ready") == 1 + 5 + 4
        rig.peering.unready.clear()
        await passed(10)
        assert (await rig.status(key)).phase == "Ready"
        assert rig.broker.activated == ["rsv-1"]


@in_virtual_time
async def test_one_that_is_not_ready_any_more_says_so():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one")
        rig.peering.unready["rsv-1"] = "the virtual node is not ready"
        await passed(60)
        status = await rig.status(key)
        assert (status.phase, status.message) == ("Connecting", "the virtual node is not ready")


@pytest.mark.parametrize("call", ["connect", "size", "ready"])
def test_a_failure_is_told_and_tried_again(call):
    @in_virtual_time
    async def test():
        async with running() as rig:
            rig.peering.fails[call] = DOWN
            key = await rig.instruct("rsv-1", "one")
            status = await rig.status(key)
            assert (status.phase, status.message) == ("Connecting", str(DOWN))
            assert rig.problem == f"default/rsv-1: {DOWN}"
            await passed(300)
            # Half a second, then twice as long each time up to a minute, less a little at random.
            assert 8 <= rig.peering.count(call) <= 16
            rig.peering.fails.clear()
            await passed(60)
            assert (await rig.status(key)).phase == "Ready"
            assert rig.problem == ""

    test()


@in_virtual_time
async def test_what_is_written_is_no_reason_to_try_at_once():
    async with running() as rig:
        rig.peering.fails["connect"] = DOWN
        await rig.instruct("rsv-1", "one")
        rig.peering.fails["connect"] = Unavailable("another message")
        await passed(10)
        assert rig.peering.count("connect") <= 8
        assert rig.problem == f"default/rsv-1: {DOWN}"


@in_virtual_time
async def test_one_that_hangs_keeps_no_other_waiting():
    async with running() as rig:
        rig.peering.seconds["connect one"] = 300
        for number in range(20):
            await rig.instruct(f"rsv-{number}", "one")
        key = await rig.instruct("rsv-other", "two")
        assert (await rig.status(key)).phase == "Ready"
        assert rig.broker.activated == ["rsv-other"]


@in_virtual_time
async def test_an_activation_that_fails_leaves_it_ready_and_is_tried_again():
    async with running() as rig:
        rig.broker.trouble = lambda: BrokerUnreachable("nobody answers")
        key = await rig.instruct("rsv-1", "one")
        assert (await rig.status(key)).phase == "Ready"
        assert rig.problem == "default/rsv-1 is ready, but not activated: nobody answers"
        await passed(30)
        assert 4 <= len(rig.broker.activated) <= 10
        rig.broker.trouble = None
        await passed(60)
        assert rig.known("rsv-1").status.phase == "Active"
        assert rig.problem == ""


@in_virtual_time
async def test_an_activation_is_tried_again_as_soon_as_the_broker_is_heard():
    async with running() as rig:
        rig.broker.trouble = lambda: BrokerUnreachable("nobody answers")
        await rig.instruct("rsv-1", "one")
        await passed(600)
        rig.broker.trouble = None
        tries = len(rig.broker.activated)
        rig.reservations.notify_reconnected()
        await settled()
        assert len(rig.broker.activated) == tries + 1
        assert rig.known("rsv-1").status.phase == "Active"


@pytest.mark.parametrize("end", ["deleted", "finished", "taken away"])
def test_what_was_not_activated_is_no_trouble_once_it_is_over(end):
    @in_virtual_time
    async def test():
        async with running() as rig:
            rig.broker.trouble = lambda: BrokerUnreachable("nobody answers")
            key = await rig.instruct("rsv-1", "one")
            assert rig.problem == "default/rsv-1 is ready, but not activated: nobody answers"
            match end:
                case "deleted":
                    await rig.delete(key)
                case "finished":
                    await rig.finish(key)
                case _:
                    await rig.take_away(key)
            assert rig.problem == ""

    test()


@in_virtual_time
async def test_what_the_broker_has_not_spoken_of_is_activated_when_it_does():
    async with running() as rig:
        rig.tell("rsv-1", "one", "Reserved")
        body = rig.known("rsv-1")
        rig.reservations.remove("rsv-1")
        await rig.objects.apply(instructions.reservation_instruction(body, "default"))
        await settled()
        assert rig.broker.activated == []
        rig.reservations.put(body)
        await settled()
        assert rig.broker.activated == ["rsv-1"]


@in_virtual_time
async def test_what_a_person_has_misspelt_is_told():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one")
        found = await rig.found(key)
        await rig.objects.apply(replace(found, spec=replace(found.spec, requested_cpu="many")))
        await settled()
        status = await rig.status(key)
        assert status.phase == "Connecting"
        assert status.message.startswith("spec.cpu: 'many'")
        await rig.delete(key)
        assert rig.peering.joined == set()
        assert await rig.is_gone(key)


# -- moving


@in_virtual_time
async def test_one_that_moves_is_parted_from_the_old_and_joined_with_the_new():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one")
        await rig.instruct("rsv-1", "two")
        assert rig.peering.joined == {("rsv-1", "two")}
        status = await rig.status(key)
        assert (status.phase, status.peered_cluster_ids) == ("Ready", ("two",))
        assert rig.broker.activated == ["rsv-1", "rsv-1"]


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_dead_provider_does_not_keep_it_from_the_next(how):
    @in_virtual_time
    async def test():
        async with running() as rig:
            key = await rig.instruct("rsv-1", "one")
            if how == "fails":
                rig.peering.fails["disconnect one"] = DOWN
            else:
                rig.peering.seconds["disconnect one"] = 300
            await rig.instruct("rsv-1", "two")
            status = await rig.status(key)
            assert (status.phase, status.peered_cluster_ids) == ("Ready", ("one", "two"))
            if how == "fails":
                assert rig.problem == f"default/rsv-1 disconnecting from one: {DOWN}"
            rig.peering.fails.clear()
            await passed(301)
            assert (await rig.status(key)).peered_cluster_ids == ("two",)
            assert rig.peering.joined == {("rsv-1", "two")}
            assert rig.problem == ""

    test()


@in_virtual_time
async def test_one_that_comes_back_to_a_provider_waits_until_it_has_left():
    async with running() as rig:
        await rig.instruct("rsv-1", "one")
        rig.peering.seconds["disconnect one"] = 60
        before = rig.peering.count("connect one")
        await rig.instruct("rsv-1", "two")
        await rig.instruct("rsv-1", "one")
        assert rig.peering.count("connect one") == before
        await passed(60)
        assert rig.peering.joined == {("rsv-1", "one")}


@in_virtual_time
async def test_the_brokers_word_counts_before_the_object_is_written():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one")
        rig.tell("rsv-1", "two", "Reserved")
        await settled()
        assert rig.peering.joined == set()
        await rig.instruct("rsv-1", "two")
        assert rig.peering.joined == {("rsv-1", "two")}
        rig.tell("rsv-1", "", "Pending")
        await settled()
        status = await rig.status(key)
        assert (status.phase, status.message) == ("Connecting", "no provider assigned")
        assert rig.peering.joined == set()


# -- after a restart


@in_virtual_time
async def test_a_restart_finishes_what_was_begun():
    async with running() as rig:
        rig.peering.seconds["connect"] = 60
        key = await rig.instruct("rsv-1", "one")
    rig.peering.seconds.clear()
    rig.keeper = rig.new_keeper()
    async with running(rig):
        assert (await rig.status(key)).phase == "Ready"
        assert rig.broker.activated == ["rsv-1"]


@pytest.mark.parametrize("end", ["deleted", "finished", "moved"])
def test_a_restart_parts_what_ended_in_the_meantime(end):
    @in_virtual_time
    async def test():
        async with running() as rig:
            key = await rig.instruct("rsv-1", "one")
        match end:
            case "deleted":
                await rig.delete(key)
            case "finished":
                await rig.finish(key)
            case _:
                await rig.instruct("rsv-1", "two")
        rig.keeper = rig.new_keeper()
        async with running(rig):
            expected = {("rsv-1", "two")} if end == "moved" else set()
            assert rig.peering.joined == expected

    test()


@in_virtual_time
async def test_a_mistake_in_the_code_ends_the_task_with_its_reason():
    rig = Rig()
    rig.peering.fails["connect"] = ZeroDivisionError("a mistake")  # type: ignore[assignment]  # a mistake
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        async with running(rig):
            await rig.instruct("rsv-1", "one")


@in_virtual_time
async def test_many_troubles_are_told_in_few_words():
    async with running() as rig:
        rig.peering.fails["connect"] = DOWN
        for number in range(5):
            await rig.instruct(f"rsv-{number}", "one")
        assert rig.problem.count("no route") == 3
        assert rig.problem.endswith("; and 2 more")
