"""Clusters are connected while a reservation is live and disconnected afterwards, whatever fails."""

import pytest
from msgspec.structs import replace

from fake_broker import UNREACHABLE
from kubelend.agent import conditions, instructions
from kubelend.agent.peering import PEERING_FINALIZER
from kubelend.agent.ports import Readiness
from kubelend.core.errors import Unavailable
from kubelend.wire.objects import ReservationInstruction
from peers import Rig, peering
from virtual_time import in_virtual_time, passed, settled

DOWN = Unavailable("liqoctl peer failed: no route to host")
NOT_ACTIVATED = "default/rsv-1 is ready, but not activated: no route"
CONNECTED = {("rsv-1", "one")}


async def end(rig, key, how):
    match how:
        case "deleted":
            await rig.delete(key)
        case "finished":
            await rig.finish(key)
        case "released":
            rig.notify("rsv-1", "one", "Released")
        case "moved":
            await rig.instruct("rsv-1", "two")
        case _:
            await rig.delete_by_force(key)
    await settled()


# -- connecting


@peering()
async def test_reservation_is_connected_sized_ready_and_activated_once(rig):
    key = await rig.instruct("rsv-1", "one")
    await rig.expect(key, "Ready", "node ready", "one")
    assert rig.peering.connected == CONNECTED
    assert rig.peering.sizes == {"rsv-1": "500m CPU / 1Gi Memory / 2 GPU"}
    assert rig.known("rsv-1").status.phase == "Active"
    await passed(600)
    assert rig.broker.activated == ["rsv-1"]
    assert rig.error == ""


@peering()
async def test_provider_is_recorded_before_anything_is_created(rig):
    rig.peering.seconds["connect"] = 60
    key = await rig.instruct("rsv-1", "one")
    assert (await rig.found(key)).metadata.finalizers == (PEERING_FINALIZER,)
    await rig.expect(key, "Connecting", "connecting to one", "one")
    assert rig.peering.connected == set()


@peering()
async def test_readiness_is_polled_ever_less_often_and_its_reason_reported(rig):
    rig.peering.unready["rsv-1"] = "no virtual node yet"
    key = await rig.instruct("rsv-1", "one")
    await passed(60)
    await rig.expect(key, "Connecting", "no virtual node yet", "one")
    assert (rig.broker.activated, rig.error) == ([], "")
    # Twice more before it is reported; half a second, then twice as long each time up to ten.
    assert rig.peering.count("ready") == 1 + 2 + 5 + 4
    rig.peering.unready.clear()
    await passed(10)
    await rig.expect(key, "Ready", "node ready", "one")
    assert rig.broker.activated == ["rsv-1"]
    rig.peering.unready["rsv-1"] = "node not ready"
    await passed(60)
    await rig.expect(key, "Connecting", "node not ready", "one")


@pytest.mark.parametrize("call", ["connect", "size", "ready"])
@peering()
async def test_failure_is_reported_and_retried(rig, call):
    rig.peering.errors[call] = DOWN
    key = await rig.instruct("rsv-1", "one")
    await rig.expect(key, "Connecting", str(DOWN), "one")
    assert rig.error == f"default/rsv-1: {DOWN}"
    rig.peering.errors[call] = Unavailable("another message")
    await passed(10)
    assert rig.peering.count(call) <= 8, "the status write is no reason to retry at once"
    assert rig.error == f"default/rsv-1: {DOWN}"
    await passed(290)
    # Half a second, then twice as long each time up to a minute, less a little at random.
    assert 8 <= rig.peering.count(call) <= 16
    rig.peering.errors.clear()
    await passed(60)
    await rig.expect(key, "Ready", "node ready", "one")
    assert rig.error == ""


@peering()
async def test_many_errors_are_summarized(rig):
    rig.peering.errors["connect"] = DOWN
    for number in range(5):
        await rig.instruct(f"rsv-{number}", "one")
    assert rig.error.count("no route") == 3
    assert rig.error.endswith("; and 2 more")


@peering()
async def test_provider_that_hangs_blocks_no_other(rig):
    rig.peering.seconds["connect one"] = 300
    for number in range(20):
        await rig.instruct(f"rsv-{number}", "one")
    key = await rig.instruct("rsv-other", "two")
    await rig.expect(key, "Ready", "node ready", "two")
    assert rig.broker.activated == ["rsv-other"]


@peering()
async def test_invalid_spec_is_reported_and_can_be_disconnected(rig):
    key = await rig.instruct("rsv-1", "one")
    found = await rig.found(key)
    await rig.objects.apply(replace(found, spec=replace(found.spec, requested_cpu="many")))
    await settled()
    status = await rig.status(key)
    assert status.phase == "Connecting"
    assert status.message.startswith("spec.cpu: 'many'")
    await rig.delete(key)
    assert rig.peering.connected == set()
    assert await rig.is_gone(key)


# -- activation


@peering()
async def test_failed_activation_leaves_it_ready_and_is_retried(rig):
    rig.broker.error = UNREACHABLE
    key = await rig.instruct("rsv-1", "one")
    await rig.expect(key, "Ready", "node ready", "one")
    assert rig.error == NOT_ACTIVATED
    await passed(30)
    assert 4 <= len(rig.broker.activated) <= 10
    await passed(570)
    rig.broker.error, attempts = None, len(rig.broker.activated)
    rig.reservations.notify_reconnected()
    await settled()
    assert len(rig.broker.activated) == attempts + 1
    assert rig.known("rsv-1").status.phase == "Active"
    assert rig.error == ""


@pytest.mark.parametrize("how", ["deleted", "finished", "by force"])
@peering()
async def test_failed_activation_is_no_error_once_the_reservation_has_ended(rig, how):
    rig.broker.error = UNREACHABLE
    key = await rig.instruct("rsv-1", "one")
    assert rig.error == NOT_ACTIVATED
    await end(rig, key, how)
    assert rig.error == ""


@peering()
async def test_activation_that_hangs_is_retried(rig):
    rig.broker.seconds["activate"] = 3600
    await rig.instruct("rsv-1", "one")
    await passed(10)
    assert "did not answer within 10s" in rig.error
    rig.broker.seconds.clear()
    await passed(60)
    assert rig.known("rsv-1").status.phase == "Active"


@peering()
async def test_reservation_is_activated_once_its_state_is_known(rig):
    rig.notify("rsv-1", "one", "Reserved")
    body = rig.known("rsv-1")
    rig.reservations.remove("rsv-1")
    await rig.objects.apply(instructions.reservation_instruction(body, "default"))
    await settled()
    assert rig.broker.activated == []
    rig.reservations.put(body)
    await settled()
    assert rig.broker.activated == ["rsv-1"]


@peering()
async def test_activation_waits_for_the_acknowledgement(rig):
    key = await rig.instruct("rsv-1", "one", is_acknowledged=False)
    await passed(29)
    await rig.expect(key, "Ready", "node ready", "one")
    assert (rig.peering.connected, rig.broker.activated) == (CONNECTED, [])
    rig.notify("rsv-1", "one", "Reserved", is_acknowledged=True)
    await settled()
    assert rig.broker.activated == ["rsv-1"]
    assert rig.error == ""


@peering()
async def test_provider_can_refuse_however_quickly_the_clusters_are_connected(rig):
    key = await rig.instruct("rsv-1", "one", is_acknowledged=False)
    assert rig.peering.connected == CONNECTED
    await passed(20)
    rig.notify("rsv-1", "one", "Failed")
    await settled()
    assert (rig.peering.connected, rig.broker.activated) == (set(), [])
    assert (await rig.found(key)).metadata.finalizers == ()


@pytest.mark.parametrize("how", ["late", "other news", "moved", "recreated"])
@peering()
async def test_acknowledgement_is_awaited_for_half_a_minute_after_the_peering_is_ready(rig, how):
    rig.peering.seconds["connect"] = 20 if how == "late" else 0
    key = await rig.instruct("rsv-1", "one", is_acknowledged=False)
    rig.peering.seconds.clear()
    await passed(20)
    if how == "other news":
        rig.notify("rsv-1", "one", "Reserved", is_acknowledged=False)
        await passed(9)
    elif how == "late":
        await passed(29)
    else:
        if how == "recreated":
            await rig.delete(key)
        target = "two" if how == "moved" else "one"
        await rig.instruct("rsv-1", target, is_acknowledged=False)
        await passed(29)
    assert rig.broker.activated == []
    await passed(1)
    assert rig.broker.activated == ["rsv-1"]


# -- failover


@pytest.mark.parametrize("becomes_ready", [True, False])
@peering()
async def test_previous_provider_is_used_for_two_minutes_or_until_the_new_one_is_ready(
    rig, becomes_ready
):
    await rig.instruct("rsv-1", "one")
    rig.peering.unready["rsv-1 two"] = "no virtual node yet"
    await rig.instruct("rsv-1", "two", is_acknowledged=False)
    await passed(60 if becomes_ready else 110)
    assert rig.peering.connected == {("rsv-1", "one"), ("rsv-1", "two")}
    assert rig.peering.count("disconnect") == 0
    if becomes_ready:
        rig.peering.unready.clear()
    await passed(20)
    assert rig.peering.connected == {("rsv-1", "two")}


@peering()
async def test_unusable_previous_provider_is_not_waited_for(rig):
    key = await rig.instruct("rsv-1", "one")
    rig.peering.unready["rsv-1"] = "API server: no route to host"
    await rig.instruct("rsv-1", "two")
    assert rig.peering.connected == {("rsv-1", "two")}
    assert rig.peering.count("disconnect one") == 1
    rig.peering.unready.clear()
    await passed(60)
    await rig.expect(key, "Ready", "node ready", "two")
    assert rig.broker.activated == ["rsv-1", "rsv-1"]


@peering()
async def test_short_outage_disconnects_nothing(rig):
    key = await rig.instruct("rsv-1", "one")
    rig.peering.unready["rsv-1"] = "APIServerStatus: Error"
    rig.peering.notify("one")
    await passed(10)
    await rig.expect(key, "Connecting", "APIServerStatus: Error", "one")
    rig.peering.unready.clear()
    rig.peering.notify("one")
    await settled()
    await rig.expect(key, "Ready", "node ready", "one")
    assert rig.peering.count("disconnect") == 0


@pytest.mark.parametrize("how", ["fails", "hangs"])
@peering()
async def test_unreachable_provider_does_not_block_the_next(rig, how):
    key = await rig.instruct("rsv-1", "one")
    if how == "fails":
        rig.peering.errors["disconnect one"] = DOWN
    else:
        rig.peering.seconds["disconnect one"] = 300
    await rig.instruct("rsv-1", "two")
    status = await rig.status(key)
    assert (status.phase, status.peered_cluster_ids) == ("Ready", ("one", "two"))
    assert rig.error == (f"default/rsv-1 disconnecting from one: {DOWN}" if how == "fails" else "")
    rig.peering.errors.clear()
    await passed(301)
    assert (await rig.status(key)).peered_cluster_ids == ("two",)
    assert rig.peering.connected == {("rsv-1", "two")}
    assert rig.error == ""


@peering()
async def test_return_to_a_provider_waits_until_it_is_disconnected(rig):
    await rig.instruct("rsv-1", "one")
    rig.peering.seconds["disconnect one"] = 60
    before = rig.peering.count("connect one")
    await rig.instruct("rsv-1", "two")
    await rig.instruct("rsv-1", "one")
    assert rig.peering.count("connect one") == before
    await passed(60)
    assert rig.peering.connected == CONNECTED


@peering()
async def test_newer_state_of_the_reservation_counts_before_the_object(rig):
    key = await rig.instruct("rsv-1", "one")
    rig.notify("rsv-1", "two", "Reserved")
    await settled()
    assert rig.peering.connected == set()
    await rig.instruct("rsv-1", "two")
    assert rig.peering.connected == {("rsv-1", "two")}
    rig.notify("rsv-1", "", "Pending")
    await settled()
    await rig.expect(key, "Connecting", "no provider assigned")
    assert rig.peering.connected == set()


# -- restarts


@in_virtual_time
async def test_restart_finishes_what_was_started():
    rig = Rig()
    async with rig.running():
        rig.peering.seconds["connect"] = 60
        key = await rig.instruct("rsv-1", "one")
    rig.peering.seconds.clear()
    rig.restart()
    async with rig.running():
        await rig.expect(key, "Ready", "node ready", "one")
        assert rig.broker.activated == ["rsv-1"]


@pytest.mark.parametrize(
    "how, is_recorded",
    [
        ("deleted", True),
        ("finished", True),
        ("moved", True),
        ("deleted", False),
        ("finished", False),
    ],
)
@in_virtual_time
async def test_restart_disconnects_what_ended_meanwhile(how, is_recorded):
    """Also from a provider that the status does not name yet."""
    rig = Rig()
    rig.peering.unready = {} if is_recorded else {"rsv-1": "no virtual node yet"}
    async with rig.running():
        key = await rig.instruct("rsv-1", "one", finalizers=(PEERING_FINALIZER,))
        assert rig.peering.connected == CONNECTED
        assert bool((await rig.found(key)).status.started_cluster_ids) == is_recorded
    await end(rig, key, how)
    rig.restart()
    async with rig.running():
        assert rig.peering.connected == ({("rsv-1", "two")} if how == "moved" else set())
        found = await rig.objects.find(ReservationInstruction, key)
        assert how == "moved" or found is None or not found.metadata.finalizers


# -- disconnecting


@pytest.mark.parametrize("how", ["finished", "deleted", "moved"])
@peering()
async def test_steps_of_a_disconnection_are_reported_once(rig, how):
    key = await rig.instruct("rsv-1", "one")
    for step, kind in (
        ("Draining", "Normal"),
        ("Disconnecting", ""),
        ("ForceUnpeering", "Warning"),
    ):
        reason = f"waiting for {step}"
        rig.peering.incomplete["disconnect"] = Readiness(False, reason, step=step)
        if step == "Draining":
            await end(rig, key, how)
        await passed(5)
        found = [one for one in rig.events if one.reason == step]
        assert [one.type for one in found] == [kind] * bool(kind)
        assert all(one.message == f"Disconnecting from cluster one: {reason}" for one in found)
        peered = conditions.find((await rig.status(key)).conditions, "Peered")
        assert peered is not None
        assert peered.status == "True"
        assert (peered.reason, peered.message) == (
            ("Connected", "peered with two") if how == "moved" else (step, reason)
        )
    rig.peering.incomplete.clear()
    await passed(5)
    assert rig.peering.connected == ({("rsv-1", "two")} if how == "moved" else set())


@pytest.mark.parametrize("how", ["finished", "deleted", "released", "by force"])
@peering()
async def test_ended_reservation_is_disconnected(rig, how):
    key = await rig.instruct("rsv-1", "one")
    other = await rig.instruct("rsv-2", "one")
    await end(rig, key, how)
    assert rig.peering.connected == {("rsv-2", "one")}
    assert (await rig.status(other)).phase == "Ready"
    assert await rig.is_gone(key) == (how in ("deleted", "by force"))
    if not await rig.is_gone(key):
        found = await rig.found(key)
        assert (found.metadata.finalizers, found.status.peered_cluster_ids) == ((), ())
        assert (found.status.phase == "Finished") == (how == "finished")
    await passed(600)
    assert rig.peering.count("disconnect") == 1


@peering()
async def test_object_stays_until_it_is_disconnected_and_says_why(rig):
    key = await rig.instruct("rsv-1", "one")
    rig.peering.errors["disconnect"] = DOWN
    await rig.delete(key)
    assert (await rig.status(key)).message == str(DOWN)
    assert rig.error == f"default/rsv-1 disconnecting from one: {DOWN}"
    rig.peering.errors.clear()
    await passed(60)
    assert await rig.is_gone(key)
    assert rig.error == ""


@pytest.mark.parametrize("call", ["connect", "size", "ready"])
@peering()
async def test_deletion_by_force_during_a_connect_leaves_nothing_behind(rig, call):
    rig.peering.seconds[call] = 10
    key = await rig.instruct("rsv-1", "one")
    await rig.delete_by_force(key)
    await passed(60)
    assert rig.peering.connected == set()
    assert rig.peering.calls[-1] == "disconnect one rsv-1"
    assert (rig.broker.activated, rig.error) == ([], "")


@peering()
async def test_recreated_object_is_connected_after_the_old_one_is_disconnected(rig):
    key = await rig.instruct("rsv-1", "one")
    rig.peering.seconds["disconnect"] = 10
    before = rig.peering.count("connect")
    await rig.delete_by_force(key)
    await rig.instruct("rsv-1", "one")
    await passed(9)
    assert rig.peering.count("connect") == before
    await passed(60)
    assert rig.peering.connected == CONNECTED
    await rig.expect(key, "Ready", "node ready", "one")


@peering()
async def test_recreated_object_is_polled_as_often_as_a_new_one(rig):
    rig.peering.unready["rsv-1"] = "no virtual node yet"
    key = await rig.instruct("rsv-1", "one")
    await passed(60)
    await rig.delete(key)
    before = rig.peering.count("ready")
    await rig.instruct("rsv-1", "one")
    await passed(4)
    assert rig.peering.count("ready") == before + 5


@peering()
async def test_connected_provider_is_known_though_another_client_cleared_the_status(rig):
    key = await rig.instruct("rsv-1", "one")
    found = await rig.found(key)
    cleared = replace(found.status, peered_cluster_ids=())
    await rig.objects.set_status(replace(found, status=cleared))
    await rig.finish(key)
    assert rig.peering.connected == set()


@peering()
async def test_reservation_that_ended_before_it_was_connected_is_ignored(rig):
    key = await rig.instruct("rsv-1", "", phase="Released")
    assert (rig.peering.calls, (await rig.found(key)).metadata.finalizers) == ([], ())


@peering()
async def test_finished_status_of_the_requester_is_not_overwritten(rig):
    rig.peering.seconds["connect"] = 10
    key = await rig.instruct("rsv-1", "one")
    await rig.finish(key)
    finished = await rig.status(key)
    await passed(60)
    await rig.expect(key, "Finished", finished.message)
    assert (rig.peering.connected, rig.broker.activated) == (set(), [])
