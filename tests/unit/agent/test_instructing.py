"""Every reservation that this cluster has got has one ReservationInstruction, and later it has none."""

import asyncio
import contextlib
from datetime import timedelta

from msgspec.structs import replace

import make
import requesters
from kubelend.agent.instructions import (
    ExpiryTracker,
    InstructionDependencies,
    InstructionReconciler,
)
from kubelend.agent.ports import Listed
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core import errors
from kubelend.core.models import ReservationId
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.objects import (
    Metadata,
    ReservationInstruction,
    ReservationInstructionSpec,
    ResourceRequest,
)
from requesters import GONE, passed, running
from virtual_time import in_virtual_time, now, settled, stopped

A_WHILE = timedelta(minutes=30)


@in_virtual_time
async def test_it_says_what_to_use_and_where():
    async with running() as rig:
        rig.broker.offers = {"p1": "cpu=8,memory=16Gi,gpu=2,storage=1Ti,example.com/fpga=3"}
        await rig.create_request(
            cpu="500m",
            requested_memory="256Mi",
            requested_gpu="1",
            requested_storage="10Gi",
            extended_resources={"example.com/fpga": "2"},
        )
        found = await rig.instruction("default/rsv-1")
        spec = found.spec
        assert (spec.reservation_name, spec.target_cluster_id) == ("rsv-1", "p1")
        assert (spec.requested_cpu, spec.requested_memory) == ("500m", "256Mi")
        assert (spec.requested_gpu, spec.requested_storage) == ("1", "10Gi")
        assert spec.extended_resources == {"example.com/fpga": "2"}
        assert spec.message.startswith("Use p1 for 500m CPU / 256Mi Memory / 1 GPU")
        assert spec.expires_at == make.T0 + make.HOUR
        assert found.status.delivered
        assert found.status.last_update_time == make.T0


@in_virtual_time
async def test_the_message_is_the_one_of_the_contract():
    async with running() as rig:
        await rig.create_request(cpu="500m", requested_memory="256Mi")
        spec = (await rig.instruction("default/rsv-1")).spec
        assert spec.message == "Use p1 for 500m CPU / 256Mi Memory"


@in_virtual_time
async def test_one_that_was_reserved_otherwise_has_one_too():
    async with running() as rig:
        rig.broker.turn()
        rig.broker.desk.reserve("cpu=1,memory=1Gi", requester="me")
        await rig.hear("rsv-1")
        assert await rig.instructions() == ["default/rsv-1"]


@in_virtual_time
async def test_what_was_known_before_it_began_is_not_missed():
    reservations, broker = ReservationCache(), requesters.LendingBroker()
    broker.turn()
    broker.desk.reserve("cpu=1,memory=1Gi", requester="me")
    reservations.put(broker.body("rsv-1"))
    async with running(reservations=reservations, broker=broker) as rig:
        assert await rig.instructions() == ["default/rsv-1"]


@in_virtual_time
async def test_what_this_cluster_lends_has_none():
    async with running() as rig:
        rig.broker.offers = {"me": "cpu=8,memory=16Gi"}
        rig.broker.turn()
        rig.broker.desk.reserve("cpu=1,memory=1Gi", requester="other")
        await rig.hear("rsv-1")
        await passed(60)
        assert await rig.instructions() == []


@in_virtual_time
async def test_it_is_where_the_request_is_unless_a_namespace_is_set():
    async with running() as rig:
        await rig.create_request(namespace="team-a")
        assert await rig.instructions() == ["team-a/rsv-1"]
    async with running(namespace="kubelend") as rig:
        await rig.create_request(namespace="team-a")
        assert await rig.instructions() == ["kubelend/rsv-1"]


@in_virtual_time
async def test_a_stream_that_is_quicker_than_the_answer_puts_it_nowhere_else():
    async with running() as rig:
        rig.broker.takes_after = 5
        await rig.create_request(namespace="team-a")
        await rig.hear("rsv-1")
        await passed(4)
        assert await rig.instructions() == []
        await passed(1)
        assert await rig.instructions() == ["team-a/rsv-1"]


@in_virtual_time
async def test_requests_that_are_not_seen_yet_may_want_it_elsewhere():
    class Slow(MemoryObjects):
        async def watch(self, kind):
            await asyncio.sleep(5 if kind is ResourceRequest else 0)
            async with contextlib.aclosing(super().watch(kind)) as events:
                async for event in events:
                    yield event

    async with running(objects=Slow(now)) as first:
        await passed(5)
        await first.create_request(namespace="team-a")
    await first.objects.delete(ReservationInstruction, "team-a/rsv-1")
    async with running(objects=first.objects, broker=first.broker) as rig:
        await rig.hear("rsv-1")
        assert await rig.instructions() == []
        await passed(5)
        assert await rig.instructions() == ["team-a/rsv-1"]


@in_virtual_time
async def test_one_that_was_reserved_otherwise_waits_until_it_is_clear_whose_it_is():
    async with running() as rig:
        rig.broker.takes_after = 5
        await rig.create_request(namespace="team-a")
        rig.broker.desk.reserve("cpu=1,memory=1Gi", requester="me")
        await rig.hear("rsv-2")
        assert await rig.instructions() == []
        await passed(6)
        assert await rig.instructions() == ["default/rsv-2", "team-a/rsv-1"]


@in_virtual_time
async def test_one_whose_request_is_gone_stays_where_it_is():
    async with running() as first:
        await first.create_request(namespace="team-a")
    found = await first.found("team-a/w")
    await first.objects.apply(replace(found, metadata=replace(found.metadata, finalizers=())))
    await first.delete("team-a/w")
    async with running(objects=first.objects, broker=first.broker) as rig:
        await rig.hear("rsv-1")
        await passed(1)
        assert await rig.instructions() == ["team-a/rsv-1"]


@in_virtual_time
async def test_one_in_the_wrong_namespace_moves():
    async with running() as first:
        await first.create_request(namespace="team-a")
    async with running(objects=first.objects, broker=first.broker, namespace="kubelend") as rig:
        await passed(1)
        assert await rig.instructions() == ["kubelend/rsv-1"]


@in_virtual_time
async def test_it_follows_a_reservation_that_moves():
    async with running() as rig:
        await rig.create_request()
        rig.broker.desk.refuse(ReservationId("rsv-1"), "p1")
        await rig.hear("rsv-1")
        found = await rig.instruction("default/rsv-1")
        assert found.spec.target_cluster_id == "p2"
        assert found.spec.message == "Use p2 for 1 CPU / 1Gi Memory"
        assert await rig.instructions() == ["default/rsv-1"]


@in_virtual_time
async def test_a_renewal_shows():
    async with running() as rig:
        await rig.create_request(renew=True)
        await passed(2401)
        spec = (await rig.instruction("default/rsv-1")).spec
        assert spec.expires_at == make.T0 + timedelta(seconds=2400) + make.HOUR


@in_virtual_time
async def test_what_others_write_at_it_stays():
    async with running() as rig:
        await rig.create_request()
        found = await rig.instruction("default/rsv-1")
        metadata = replace(found.metadata, finalizers=("theirs",), labels={"a": "b"})
        found = await rig.objects.apply(replace(found, metadata=metadata))
        await rig.objects.set_status(replace(found, status=replace(found.status, phase="Ready")))
        rig.broker.desk.refuse(ReservationId("rsv-1"), "p1")
        await rig.hear("rsv-1")
        found = await rig.instruction("default/rsv-1")
        assert found.spec.target_cluster_id == "p2"
        assert (found.metadata.finalizers, found.metadata.labels) == (("theirs",), {"a": "b"})
        assert found.status.phase == "Ready"


@in_virtual_time
async def test_one_that_somebody_deletes_or_spoils_is_made_anew():
    async with running() as rig:
        await rig.create_request()
        await rig.objects.delete(ReservationInstruction, "default/rsv-1")
        await settled()
        found = await rig.instruction("default/rsv-1")
        await rig.objects.apply(replace(found, spec=replace(found.spec, target_cluster_id="x")))
        await settled()
        assert (await rig.instruction("default/rsv-1")).spec == found.spec


@in_virtual_time
async def test_when_it_is_over_it_is_finished_and_goes_after_a_while():
    async with running(finished_ttl=A_WHILE) as rig:
        await rig.create_request()
        await passed(3600)
        found = await rig.instruction("default/rsv-1")
        assert (found.status.phase, found.status.message) == ("Finished", "Duration elapsed")
        assert found.status.finished_at == now()
        await passed(1799)
        assert await rig.instructions() == ["default/rsv-1"]
        await passed(1)
        assert await rig.instructions() == []


@in_virtual_time
async def test_the_while_is_counted_on_over_a_restart():
    async with running(finished_ttl=A_WHILE) as first:
        await first.create_request()
        await passed(3600 + 1200)
    async with running(objects=first.objects, broker=first.broker, finished_ttl=A_WHILE) as rig:
        finished_at = (await rig.instruction("default/rsv-1")).status.finished_at
        assert finished_at == make.T0 + make.HOUR
        await passed(601)
        assert await rig.instructions() == []


@in_virtual_time
async def test_one_that_ended_while_the_agent_was_dead_is_finished():
    async with running() as first:
        await first.create_request()
        await first.delete("default/w")
        key = await first.create_request("forced")
    first.broker.desk.release(ReservationId("rsv-2"))
    async with running(objects=first.objects, broker=first.broker) as rig:
        assert (await rig.instruction("default/rsv-2")).status.phase == "Finished"
        assert (await rig.status(key)).phase == "Released"


@in_virtual_time
async def test_one_that_the_broker_has_forgotten_is_finished():
    async with running() as first:
        await first.create_request()
    first.broker.forget("rsv-1")
    async with running(objects=first.objects, broker=first.broker) as rig:
        status = (await rig.instruction("default/rsv-1")).status
        assert (status.phase, status.message) == (
            "Finished",
            "Reservation not found on the broker",
        )


@in_virtual_time
async def test_one_that_the_broker_does_not_know_at_its_end_is_finished():
    async with running() as rig:
        await rig.create_request()
        rig.broker.forget("rsv-1")
        await passed(3600)
        assert (await rig.instruction("default/rsv-1")).status.phase == "Finished"


@in_virtual_time
async def test_while_the_broker_is_away_nothing_is_finished():
    async with running() as first:
        await first.create_request()
    first.broker.trouble = GONE
    async with running(objects=first.objects, broker=first.broker) as rig:
        await passed(7200)
        assert (await rig.instruction("default/rsv-1")).status.phase == ""


@in_virtual_time
async def test_objects_that_cannot_be_written_are_written_later():
    objects = requesters.TroubledObjects()
    async with running(objects=objects) as rig:
        rig.broker.turn()
        rig.broker.desk.reserve("cpu=1,memory=1Gi", requester="me")
        objects.trouble = errors.Unavailable("the API server is away")
        await rig.hear("rsv-1")
        assert await rig.instructions() == []
        objects.trouble = None
        await passed(2)
        assert await rig.instructions() == ["default/rsv-1"]


@in_virtual_time
async def test_what_is_over_for_long_is_not_remembered():
    async with running(finished_ttl=A_WHILE) as rig:
        await rig.create_request()
        await rig.create_request("big", cpu="7", wait="1s", requested_gpu="2")
        rig.broker.desk.reserve("cpu=1,memory=1Gi", requester="me", wait=make.MINUTE)
        await passed(3 * 3600)
        assert await rig.instructions() == []
        assert rig.reservations.find("rsv-1") is None
        assert rig.reservations.find("rsv-2") is None


@in_virtual_time
async def test_an_old_word_that_comes_late_revives_nothing():
    async with running(finished_ttl=A_WHILE) as rig:
        key = await rig.create_request()
        old = rig.broker.body("rsv-1")
        await rig.delete(key)
        await passed(1700)
        rig.reservations.put(old)
        await passed(1)
        assert (await rig.instruction("default/rsv-1")).status.phase == "Finished"


@in_virtual_time
async def test_an_old_word_on_one_that_never_had_an_object_revives_nothing():
    async with running() as rig:
        await rig.create_request("big", cpu="8", requested_gpu="2")
        key = await rig.create_request("waits", cpu="5", wait="10m")
        old = rig.broker.body("rsv-2")
        await rig.delete(key)
        await passed(60)
        rig.reservations.put(old)
        assert [found.id for found in rig.reservations.unfinished()] == ["rsv-1"]


@in_virtual_time
async def test_nothing_is_written_when_nothing_changes():
    async with running() as rig:
        await rig.create_request()
        found = await rig.instruction("default/rsv-1")
        await passed(600)
        labelled = replace(found, metadata=replace(found.metadata, labels={"looked": "at"}))
        kept = await rig.objects.apply(labelled)
        await settled()
        assert await rig.instruction("default/rsv-1") == kept


@in_virtual_time
async def test_a_list_that_comes_while_one_is_looked_after_is_no_mistake():
    class Relisted(MemoryObjects):
        """Tells of all that there is, which is nothing, in the middle of every look."""

        async def find(self, kind, key):
            if kind is ReservationInstruction:
                instructor.handle_event(Listed([]))
            return await super().find(kind, key)

    broker = requesters.LendingBroker()
    outside = InstructionDependencies(Relisted(now), broker, ReservationCache(), now)
    instructor = InstructionReconciler(
        outside,
        ExpiryTracker(now, lambda: 0.0),
        lambda reservation: "default",
        cluster_id="me",
        finished_ttl=A_WHILE,
        chance=lambda: 0.0,
    )
    broker.refused["find"] = errors.NotFound("none")
    task = asyncio.create_task(instructor.queue.run())
    gone = ReservationInstruction(
        Metadata("rsv-1"),
        ReservationInstructionSpec("1", "1Gi", reservation_name="rsv-1", target_cluster_id="p1"),
    )
    instructor.handle_event(gone)
    await settled()
    assert not task.done()
    await stopped(task)


@in_virtual_time
async def test_the_end_keeps_what_the_peering_writes_in_the_same_moment():
    class Crowded(MemoryObjects):
        """The peering writes right before the first that tells of the end."""

        async def set_status(self, wanted):
            if wanted.status.phase == "Finished" and not peered:
                peered.append("p1")
                found = await self.find(type(wanted), wanted.key)
                assert found is not None
                joined = replace(found.status, peered_cluster_ids=("p1",))
                await super().set_status(replace(found, status=joined))
            return await super().set_status(wanted)

    peered: list[str] = []
    async with running(objects=Crowded(now)) as rig:
        await rig.create_request()
        rig.broker.desk.release(ReservationId("rsv-1"))
        await rig.hear("rsv-1")
        status = (await rig.instruction("default/rsv-1")).status
        assert (status.phase, status.peered_cluster_ids) == ("Finished", ("p1",))
