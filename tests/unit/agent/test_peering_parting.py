"""Clusters are parted when a reservation is over, and nothing is left behind, whatever happens meanwhile."""

import pytest
from msgspec.structs import replace

from joiners import passed, running
from kubelend.core.errors import Unavailable
from virtual_time import in_virtual_time, settled

DOWN = Unavailable("liqoctl peer failed: no route to host")


@pytest.mark.parametrize("end", ["finished", "deleted", "released", "taken away"])
def test_one_that_is_over_is_parted(end):
    @in_virtual_time
    async def test():
        async with running() as rig:
            key = await rig.instruct("rsv-1", "one")
            other = await rig.instruct("rsv-2", "one")
            match end:
                case "finished":
                    await rig.finish(key)
                    assert (await rig.status(key)).phase == "Finished"
                case "deleted":
                    await rig.delete(key)
                    assert await rig.is_gone(key)
                case "released":
                    rig.tell("rsv-1", "one", "Released")
                case _:
                    await rig.take_away(key)
            await settled()
            assert rig.peering.joined == {("rsv-2", "one")}
            assert (await rig.status(other)).phase == "Ready"
            if not await rig.is_gone(key):
                found = await rig.found(key)
                assert (found.metadata.finalizers, found.status.peered_cluster_ids) == ((), ())
            await passed(600)
            assert rig.peering.count("disconnect") == 1

    test()


@in_virtual_time
async def test_an_object_stays_until_it_is_parted_and_says_why():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one")
        rig.peering.fails["disconnect"] = DOWN
        await rig.delete(key)
        assert (await rig.status(key)).message == str(DOWN)
        assert rig.problem == f"default/rsv-1 disconnecting from one: {DOWN}"
        rig.peering.fails.clear()
        await passed(60)
        assert await rig.is_gone(key)
        assert rig.problem == ""


@pytest.mark.parametrize("call", ["connect", "size", "ready"])
def test_what_is_taken_away_while_it_is_being_joined_leaves_nothing_behind(call):
    @in_virtual_time
    async def test():
        async with running() as rig:
            rig.peering.seconds[call] = 10
            key = await rig.instruct("rsv-1", "one")
            await rig.take_away(key)
            await passed(60)
            assert rig.peering.joined == set()
            assert rig.peering.calls[-1] == "disconnect one rsv-1"
            assert (rig.broker.activated, rig.problem) == ([], "")

    test()


@in_virtual_time
async def test_one_made_anew_is_joined_after_the_old_one_has_left():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one")
        rig.peering.seconds["disconnect"] = 10
        before = rig.peering.count("connect")
        await rig.take_away(key)
        await rig.instruct("rsv-1", "one")
        await passed(9)
        assert rig.peering.count("connect") == before
        await passed(60)
        assert rig.peering.joined == {("rsv-1", "one")}
        assert (await rig.status(key)).phase == "Ready"


@in_virtual_time
async def test_one_made_anew_is_asked_for_its_readiness_as_often_as_any_new_one():
    async with running() as rig:
        rig.peering.unready["rsv-1"] = "there is no virtual node yet"
        key = await rig.instruct("rsv-1", "one")
        await passed(60)
        await rig.delete(key)
        before = rig.peering.count("ready")
        await rig.instruct("rsv-1", "one")
        await passed(4)
        assert rig.peering.count("ready") == before + 4


@in_virtual_time
async def test_what_was_joined_is_known_though_somebody_wrote_over_the_status():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one")
        found = await rig.found(key)
        await rig.objects.set_status(
            replace(found, status=replace(found.status, peered_cluster_ids=()))
        )
        await rig.finish(key)
        assert rig.peering.joined == set()


@in_virtual_time
async def test_finalizers_of_others_stay():
    async with running() as rig:
        rig.peering.seconds["connect"] = 10
        key = await rig.instruct("rsv-1", "one")
        found = await rig.found(key)
        both = (*found.metadata.finalizers, "example.org/other")
        await rig.objects.apply(replace(found, metadata=replace(found.metadata, finalizers=both)))
        await passed(20)
        await rig.delete(key)
        assert (await rig.found(key)).metadata.finalizers == ("example.org/other",)


@in_virtual_time
async def test_what_was_over_before_it_was_joined_is_left_alone():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "", phase="Released")
        assert (rig.peering.calls, (await rig.found(key)).metadata.finalizers) == ([], ())


@in_virtual_time
async def test_the_end_that_the_requester_told_stays_as_it_is():
    async with running() as rig:
        rig.peering.seconds["connect"] = 10
        key = await rig.instruct("rsv-1", "one")
        await rig.finish(key)
        told = await rig.status(key)
        await passed(60)
        status = await rig.status(key)
        assert (status.phase, status.message) == ("Finished", told.message)
        assert (rig.peering.joined, rig.broker.activated) == (set(), [])
