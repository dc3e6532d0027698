"""Every reservation of the requester has one ReservationInstruction, which ends after it; and its expiry."""

import asyncio
import contextlib
from datetime import timedelta

import pytest
from msgspec.structs import replace

import make
import requesters
from failing_objects import FailingObjects
from fake_broker import UNREACHABLE
from kubelend.agent.instructions import (
    ExpiryTracker,
    InstructionReconciler,
)
from kubelend.agent.ports import Listed
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core import errors
from kubelend.core.models import ReservationId
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.events import discard_event
from kubelend.wire.objects import (
    Metadata,
    ReservationInstruction,
    ReservationInstructionSpec,
    ResourceRequest,
)
from make import HOUR, MINUTE
from requesters import requester
from virtual_time import in_virtual_time, now, passed, settled, stopped

RETENTION = 30 * MINUTE
KEY = "default/rsv-1"
RSV = ReservationId("rsv-1")


def reserve(rig, by="me", **fields):
    """By another client than the agent."""
    rig.broker.advance()
    return rig.broker.runner.reserve("cpu=1,memory=1Gi", requester=by, **fields)


# -- its spec


@requester()
async def test_instruction_says_what_to_use_and_where(rig):
    rig.broker.offers = {"p1": "cpu=8,memory=16Gi,gpu=2,storage=1Ti,example.com/fpga=3"}
    await rig.create_request("plain", cpu="500m", requested_memory="256Mi")
    await rig.create_request(
        requested_gpu="1", requested_storage="10Gi", extended_resources={"example.com/fpga": "2"}
    )
    plain, full = await rig.instruction(KEY), await rig.instruction("default/rsv-2")
    assert plain.spec == ReservationInstructionSpec(
        "500m",
        "256Mi",
        reservation_name="rsv-1",
        target_cluster_id="p1",
        message="Use p1 for 500m CPU / 256Mi Memory",
        expires_at=make.T0 + HOUR,
    )
    assert plain.status.delivered
    assert plain.status.last_update_time == make.T0
    assert (full.spec.requested_gpu, full.spec.requested_storage) == ("1", "10Gi")
    assert full.spec.extended_resources == {"example.com/fpga": "2"}
    assert full.spec.message.startswith("Use p1 for 1 CPU / 1Gi Memory / 1 GPU")


@in_virtual_time
async def test_reservation_that_another_client_requested_has_one_too():
    rig = requesters.Rig()
    rig.reservations.put(rig.broker.body(reserve(rig)))
    async with rig.running():
        assert await rig.instructions() == [KEY], "known before the start"
        await rig.notify(reserve(rig))
        assert await rig.instructions() == [KEY, "default/rsv-2"]


@requester()
async def test_reservation_that_this_cluster_provides_has_none(rig):
    rig.broker.offers = {"me": "cpu=8,memory=16Gi"}
    await rig.notify(reserve(rig, by="other"))
    await passed(60)
    assert await rig.instructions() == []


@requester()
async def test_instruction_follows_failover_and_renewal_and_keeps_what_others_write(rig):
    await rig.create_request(renew=True)
    found = await rig.instruction(KEY)
    metadata = replace(found.metadata, finalizers=("theirs",), labels={"a": "b"})
    found = await rig.objects.apply(replace(found, metadata=metadata))
    await rig.objects.set_status(replace(found, status=replace(found.status, phase="Ready")))
    rig.broker.runner.refuse(RSV, "p1")
    await rig.notify("rsv-1")
    await passed(2401)
    found = await rig.instruction(KEY)
    assert found.spec.target_cluster_id == "p2"
    assert found.spec.message == "Use p2 for 1 CPU / 1Gi Memory"
    assert found.spec.expires_at == make.T0 + timedelta(seconds=2400) + HOUR
    assert (found.metadata.finalizers, found.metadata.labels) == (("theirs",), {"a": "b"})
    assert found.status.phase == "Ready"
    assert await rig.instructions() == [KEY]


@requester()
async def test_deleted_or_modified_instruction_is_restored(rig):
    await rig.create_request()
    await rig.objects.delete(ReservationInstruction, KEY)
    await settled()
    found = await rig.instruction(KEY)
    await rig.objects.apply(replace(found, spec=replace(found.spec, target_cluster_id="x")))
    await settled()
    assert (await rig.instruction(KEY)).spec == found.spec


@requester()
async def test_nothing_is_written_while_nothing_changes(rig):
    await rig.create_request()
    found = await rig.instruction(KEY)
    await passed(600)
    labelled = replace(found, metadata=replace(found.metadata, labels={"team": "a"}))
    stored = await rig.objects.apply(labelled)
    await settled()
    assert await rig.instruction(KEY) == stored


@requester()
async def test_instruction_that_cannot_be_written_is_retried(rig):
    rig.objects.error = errors.Unavailable("no API server")
    await rig.notify(reserve(rig))
    assert await rig.instructions() == []
    rig.objects.error = None
    await passed(2)
    assert await rig.instructions() == [KEY]


@in_virtual_time
async def test_list_during_a_reconcile_is_no_failure():
    class Relisted(MemoryObjects):
        async def find(self, kind, key):
            if kind is ReservationInstruction:
                reconciler.handle_event(Listed([]))
            return await super().find(kind, key)

    broker = requesters.lending_broker()
    reconciler = InstructionReconciler(
        Relisted(now),
        broker,
        ReservationCache(),
        now,
        ExpiryTracker(now, lambda: 0.0),
        "default",
        lambda reservation: None,
        offload_lookup=lambda reservation: (),
        cluster_id="me",
        finished_ttl=RETENTION,
        chance=lambda: 0.0,
        emit=discard_event,
    )
    broker.errors["find"] = errors.NotFound("none")
    task = asyncio.create_task(reconciler.queue.run())
    spec = ReservationInstructionSpec("1", "1Gi", reservation_name="rsv-1", target_cluster_id="p1")
    reconciler.handle_event(ReservationInstruction(Metadata("rsv-1"), spec))
    await settled()
    assert not task.done()
    await stopped(task)


@requester(finalizers=("example.org/peering",))
async def test_new_instruction_has_the_finalizers_of_its_owners_and_no_other_gets_them_again(rig):
    await rig.create_request()
    [found] = await rig.objects.list(ReservationInstruction)
    assert found.metadata.finalizers == ("example.org/peering",)
    await rig.objects.apply(replace(found, metadata=replace(found.metadata, finalizers=())))
    await rig.notify("rsv-1")
    [found] = await rig.objects.list(ReservationInstruction)
    assert found.metadata.finalizers == ()


@requester(finalizers=("example.org/peering",))
async def test_provider_is_recorded_before_the_spec_names_another_one(rig):
    """The peering may be connected with it, and have been killed before it reported that."""
    await rig.create_request()
    rig.broker.runner.refuse(RSV, "p1")
    await rig.notify("rsv-1")
    found = await rig.instruction(KEY)
    assert (found.spec.target_cluster_id, found.status.started_cluster_ids) == ("p2", ("p1",))


# -- its namespace


@requester()
async def test_instructions_move_into_the_namespace_that_is_set(rig):
    await rig.create_request(namespace="team-a")
    assert await rig.instructions() == ["default/rsv-1"]
    await rig.restart(namespace="kubelend")
    await passed(1)
    await rig.create_request("other", namespace="team-a")
    assert await rig.instructions() == ["kubelend/rsv-1", "kubelend/rsv-2"]


class SlowObjects(FailingObjects):
    """ResourceRequests are listed after five seconds."""

    async def watch(self, kind):
        await asyncio.sleep(5 if kind is ResourceRequest else 0)
        async with contextlib.aclosing(super().watch(kind)) as events:
            async for event in events:
                yield event


@requester(objects=SlowObjects, namespace="kubelend")
async def test_instruction_names_the_namespace_to_offload_also_after_a_restart(rig):
    """Its request is not known at first."""
    await passed(5)
    await rig.create_request(namespace="team-a", namespaces=("team-a",))
    await rig.create_request("other", namespace="team-a")
    for seconds in (1, 10):
        found = await rig.objects.list(ReservationInstruction)
        offloaded = {one.metadata.name: one.spec.namespaces for one in found}
        assert offloaded == {"rsv-1": ("team-a",), "rsv-2": ()}
        assert {one.metadata.generation for one in found} == {1}
        await rig.restart()
        await rig.notify("rsv-1")
        await passed(seconds)


# -- its end


@pytest.mark.parametrize("is_restarted", [False, True])
@requester(finished_ttl=RETENTION)
async def test_instruction_is_finished_with_its_reservation_and_deleted_after_the_retention(
    rig, is_restarted
):
    await rig.create_request()
    await passed(3600)
    status = (await rig.instruction(KEY)).status
    assert (status.phase, status.message) == ("Finished", "Duration elapsed")
    assert status.finished_at == now()
    await passed(1200 if is_restarted else 1799)
    assert await rig.instructions() == [KEY]
    if not is_restarted:
        await passed(1)
        assert await rig.instructions() == []
        return
    await rig.restart()
    assert (await rig.instruction(KEY)).status.finished_at == make.T0 + HOUR
    await passed(601)
    assert await rig.instructions() == []


@pytest.mark.parametrize(
    "end, phase, message",
    [
        ("released", "Finished", "Released by requester me"),
        ("archived", "Finished", "Reservation not found on the broker"),
        ("unreachable", "", ""),
    ],
)
@requester()
async def test_end_while_the_agent_was_down(rig, end, phase, message):
    await rig.create_request()
    await rig.stop()
    if end == "released":
        rig.broker.runner.release(RSV)
    elif end == "archived":
        rig.broker.archive("rsv-1")
    else:
        rig.broker.error = UNREACHABLE
    await rig.start()
    await passed(0 if phase else 7200)
    status = (await rig.instruction(KEY)).status
    assert (status.phase, status.message) == (phase, message)
    if end == "unreachable":
        rig.broker.error = None
        rig.reservations.notify_reconnected()
        await settled()
        assert (await rig.instruction(KEY)).status.phase == "Finished"


@requester()
async def test_reservation_that_the_broker_does_not_know_at_its_expiry_is_finished(rig):
    await rig.create_request()
    rig.broker.archive("rsv-1")
    await passed(3600)
    assert (await rig.instruction(KEY)).status.phase == "Finished"


class ContendedObjects(FailingObjects):
    """The peering writes a provider just before the instruction is finished."""

    async def set_status(self, wanted):
        found = await self.find(type(wanted), wanted.key)
        assert found is not None
        if wanted.status.phase == "Finished" and not found.status.peered_cluster_ids:
            status = replace(found.status, peered_cluster_ids=("p1",))
            await super().set_status(replace(found, status=status))
        return await super().set_status(wanted)


@requester(objects=ContendedObjects)
async def test_end_keeps_what_the_peering_writes_at_the_same_moment(rig):
    await rig.create_request()
    rig.broker.runner.release(RSV)
    await rig.notify("rsv-1")
    status = (await rig.instruction(KEY)).status
    assert (status.phase, status.peered_cluster_ids) == ("Finished", ("p1",))


@requester(finished_ttl=RETENTION)
async def test_finished_reservations_are_evicted_after_the_retention(rig):
    await rig.create_request()
    await rig.create_request("big", cpu="7", wait="1s", requested_gpu="2")
    reserve(rig, wait=MINUTE)
    await passed(3 * 3600)
    assert await rig.instructions() == []
    assert rig.reservations.find("rsv-1") is None
    assert rig.reservations.find("rsv-2") is None


@requester(finished_ttl=RETENTION)
async def test_late_outdated_state_revives_nothing(rig):
    await rig.create_request("big", cpu="8", requested_gpu="2")
    queued = await rig.create_request("waits", cpu="5", wait="10m")
    outdated = [rig.broker.body("rsv-1"), rig.broker.body("rsv-2")]
    for key in (queued, "default/big"):
        await rig.delete(key)
    await passed(1700)
    for body in outdated:
        rig.reservations.put(body)
    await passed(1)
    assert (await rig.instruction(KEY)).status.phase == "Finished"
    assert rig.reservations.unfinished() == []


# -- expiry


def body(expires_at=make.T0 + HOUR, duration="1h", **status):
    shown = bodies.ReservationStatus("Reserved", "", expires_at=expires_at, **status)
    return bodies.Reservation(
        "r", "me", "p", bodies.Quantities("1", "1Gi"), shown, make.T0, 0, duration
    )


@pytest.mark.parametrize(
    "known, remaining, to_renewal",
    [
        pytest.param(body(None, wait_until=make.T0 + MINUTE), MINUTE, None, id="queued"),
        pytest.param(body(), HOUR, 0 * HOUR, id="how long it lasts is not known exactly"),
        pytest.param(body(None), None, None, id="without an end"),
        pytest.param(
            *(body(duration="", reserved_at=make.T0 + 40 * MINUTE), 20 * MINUTE, 0 * HOUR),
            id="an older broker: the initial duration counts",
        ),
    ],
)
@in_virtual_time
async def test_reported_end_replaces_the_one_before(known, remaining, to_renewal):
    tracker = ExpiryTracker(now, lambda: 0.0)
    tracker.observe(body(None, wait_until=make.T0 + 5 * MINUTE))
    tracker.observe(known)
    assert (tracker.remaining("r"), tracker.time_to_renewal("r")) == (remaining, to_renewal)
