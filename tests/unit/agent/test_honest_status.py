"""A ResourceRequest says what can be used, and how far it is: phase, conditions and Events, peered or not."""

import asyncio
from contextlib import asynccontextmanager

import pytest

import make
import requesters
from kubelend.agent.peering import PEERING_FINALIZER, PeeringReconciler
from kubelend.core.errors import Unavailable
from kubelend.core.models import ReservationId
from kubelend.wire.events import EventRecord
from kubelend.wire.objects import ReservationInstruction
from peers import FakePeering
from virtual_time import now, passed, settled, stopped, with_rig

DOWN = Unavailable("liqoctl peer failed: no route to host")
NO_PEERING = "no peering is configured"


class Rig(requesters.Rig):
    """A requester with its peering; None for none."""

    def __init__(self, peering):
        self.emitted: list[EventRecord] = []
        super().__init__(emit=self.emitted.append)
        self.peering = peering
        self.peerings = self.new_peerings(peering)

    def new_peerings(self, peering):
        return PeeringReconciler(
            self.objects,
            self.broker,
            self.reservations,
            peering,
            self.health,
            now,
            emit=self.emitted.append,
        )

    async def reserve(self, **spec):
        key = await self.create_request(**spec)
        await self.acknowledge()
        return key

    async def acknowledge(self, reservation="rsv-1"):
        found = self.broker.desk[ReservationId(reservation)]
        self.broker.desk.acknowledge(found.id, str(found.target))
        await self.notify(reservation)
        await settled()

    async def conditions(self, key):
        """Status and reason by type, after a check that each is about the current spec."""
        found = await self.found(key)
        generation = found.metadata.generation
        assert {one.observed_generation for one in found.status.conditions} == {generation}
        return {one.type: (one.status, one.reason) for one in found.status.conditions}

    async def use(self):
        [found] = await self.objects.list(ReservationInstruction)
        return found

    def events(self, kind):
        return [
            event.reason
            for event in self.emitted
            if type(event.involved_object).__name__ == kind and event.message
        ]


@asynccontextmanager
async def running(peering):
    rig = Rig(peering)
    tasks = [asyncio.create_task(rig.requester.run()), asyncio.create_task(rig.peerings.run())]
    await settled()
    try:
        yield rig
    finally:
        for task in tasks:
            await stopped(task)


unpeered = with_rig(lambda: running(None))
peered = with_rig(lambda: running(FakePeering()))


# -- without a peering


@unpeered
async def test_request_without_a_peering_stays_reserved_and_says_so(rig):
    key = await rig.reserve()
    await passed(600)
    status = await rig.expect(key, "Reserved")
    assert status.message == f"Resources reserved in cluster p1; {NO_PEERING}"
    assert await rig.conditions(key) == {
        "Reserved": ("True", "Reserved"),
        "Peered": ("False", "NoPeering"),
        "Ready": ("False", "NoPeering"),
    }
    assert rig.broker.named("activate") == []


@unpeered
async def test_instruction_without_a_peering_names_no_peered_cluster_and_has_no_finalizer(rig):
    await rig.reserve()
    use = await rig.use()
    assert (use.status.phase, use.status.message) == ("NotPeered", NO_PEERING)
    assert (use.status.peered_cluster_ids, use.status.started_cluster_ids) == ((), ())
    assert use.metadata.finalizers == ()
    assert rig.health.errors == {}


@unpeered
async def test_activation_by_another_client_makes_it_active_and_ready_but_not_peered(rig):
    key = await rig.reserve()
    rig.broker.desk.activate(ReservationId("rsv-1"))
    await rig.notify("rsv-1")
    await settled()
    await rig.expect(key, "Active")
    conditions = await rig.conditions(key)
    assert conditions["Ready"] == ("True", "Activated")
    assert conditions["Peered"] == ("False", "NoPeering")


@unpeered
async def test_events_without_a_peering_name_each_step(rig):
    key = await rig.reserve()
    assert rig.events("ResourceRequest") == ["Requested", "Reserved", "NoPeering"]
    assert rig.events("ReservationInstruction") == ["Delivered", "NoPeering"]
    await rig.delete(key)
    await settled()
    assert rig.events("ResourceRequest")[3:] == ["Released"]
    assert rig.events("ReservationInstruction")[2:] == ["Finished"]


# -- with a peering


@peered
async def test_request_is_active_and_ready_when_its_node_is(rig):
    rig.peering.unready["rsv-1"] = "no virtual node yet"
    key = await rig.reserve()
    await rig.expect(key, "Reserved", message="Resources reserved in cluster p1")
    assert await rig.conditions(key) == {
        "Reserved": ("True", "Reserved"),
        "Peered": ("True", "Connected"),
        "Ready": ("False", "NodeNotReady"),
    }
    rig.peering.unready.clear()
    await passed(60)
    await rig.expect(key, "Active")
    assert (await rig.conditions(key))["Ready"] == ("True", "NodeReady")
    assert (await rig.use()).status.peered_cluster_ids == ("p1",)


@peered
async def test_cluster_is_named_as_peered_only_when_it_is(rig):
    rig.peering.errors["connect"] = DOWN
    key = await rig.reserve()
    status = (await rig.use()).status
    assert (status.peered_cluster_ids, status.started_cluster_ids) == ((), ("p1",))
    conditions = await rig.conditions(key)
    assert conditions["Peered"] == conditions["Ready"] == ("False", "PeeringFailed")
    rig.peering.errors.clear()
    await passed(60)
    assert (await rig.use()).status.peered_cluster_ids == ("p1",)
    assert (await rig.conditions(key))["Peered"] == ("True", "Connected")


@peered
async def test_node_that_is_lost_makes_it_unready_and_not_unpeered(rig):
    key = await rig.reserve()
    await passed(1)
    rig.peering.unready["rsv-1"] = "node not ready"
    await passed(61)
    conditions = await rig.conditions(key)
    assert conditions["Ready"] == ("False", "NodeNotReady")
    assert conditions["Peered"] == ("True", "Connected")
    assert rig.events("ResourceRequest")[-1] == "NotReady"


@peered
async def test_renewal_does_not_make_it_unready(rig):
    key = await rig.reserve(renew=True, duration="1h")
    await passed(1)
    await rig.expect(key, "Active")
    await passed(5 * 3600)
    assert (await rig.conditions(key))["Ready"] == ("True", "NodeReady")
    assert "NotReady" not in rig.events("ResourceRequest")


@peered
async def test_failover_is_unready_until_the_new_provider_is_connected(rig):
    key = await rig.reserve()
    await passed(1)
    await rig.expect(key, "Active")
    rig.peering.errors["connect p2"] = DOWN
    rig.broker.desk.drain("p1")
    await rig.notify("rsv-1")
    await settled()
    await rig.expect(key, "Reserved", target_cluster_id="p2")
    conditions = await rig.conditions(key)
    assert conditions["Peered"] == conditions["Ready"] == ("False", "PeeringFailed")
    assert "Moved" in rig.events("ResourceRequest")
    assert "Moved" in rig.events("ReservationInstruction")
    rig.peering.errors.clear()
    await rig.acknowledge()
    await passed(60)
    await rig.expect(key, "Active", target_cluster_id="p2")
    assert (await rig.conditions(key))["Ready"] == ("True", "NodeReady")


@peered
async def test_events_with_a_peering_name_each_step(rig):
    key = await rig.reserve()
    await passed(1)
    requested = rig.events("ResourceRequest")
    assert requested[:2] == ["Requested", "Reserved"]
    assert sorted(requested[2:]) == ["Active", "Peered", "Ready"]
    assert rig.events("ReservationInstruction") == [
        *("Delivered", "PeeringStarted", "Peered", "Ready")
    ]
    await rig.delete(key)
    await passed(1)
    assert rig.events("ResourceRequest")[5:] == ["Released"]
    assert rig.events("ReservationInstruction")[4:] == ["Finished", "Disconnected"]
    status = (await rig.use()).status
    assert (status.peered_cluster_ids, status.started_cluster_ids) == ((), ())
    assert {one.type: one.status for one in status.conditions} == {
        "Peered": "False",
        "Ready": "False",
    }


@peered
async def test_repeated_failure_of_the_peering_is_one_event(rig):
    rig.peering.errors["connect"] = DOWN
    await rig.reserve()
    await passed(600)
    assert rig.events("ResourceRequest").count("PeeringFailed") == 1
    assert rig.events("ReservationInstruction").count("PeeringFailed") == 1


@with_rig(lambda: running(FakePeering()))
async def test_agent_that_is_started_without_its_peering_lets_objects_go(rig):
    await rig.reserve()
    await passed(1)
    assert (await rig.use()).metadata.finalizers == (PEERING_FINALIZER,)
    rig.peerings = rig.new_peerings(None)
    task = asyncio.create_task(rig.peerings.run())
    await settled()
    assert (await rig.use()).status.peered_cluster_ids == ()
    await rig.delete("default/w")
    await passed(1)
    assert (await rig.use()).metadata.finalizers == ()
    await stopped(task)


# -- requests that are not reserved


@pytest.mark.parametrize(
    "spec, reason, events",
    [
        ({"cpu": "99"}, "NoCapacity", ["Requested", "Rejected"]),
        ({"cpu": "two"}, "InvalidQuantity", ["Rejected"]),
        ({"cpu": "99", "wait": "10m"}, "Waiting", ["Requested", "Queued"]),
    ],
    ids=["rejected", "invalid", "queued"],
)
@unpeered
async def test_request_that_is_not_reserved_has_the_reason(rig, spec, reason, events):
    key = await rig.create_request(**spec)
    assert await rig.conditions(key) == {
        "Reserved": ("False", reason),
        "Peered": ("False", "NotReserved"),
        "Ready": ("False", "NotReserved"),
    }
    assert rig.events("ResourceRequest") == events


@unpeered
async def test_broker_that_is_unreachable_is_one_warning(rig):
    rig.broker.error = requesters.UNREACHABLE
    key = await rig.create_request()
    await passed(300)
    assert (await rig.conditions(key))["Reserved"] == ("False", "BrokerUnreachable")
    assert rig.events("ResourceRequest") == ["Requested", "BrokerUnreachable"]


@unpeered
async def test_expiry_is_an_event_and_ends_all_conditions(rig):
    key = await rig.reserve(duration="1h")
    await passed(3601)
    await rig.expect(key, "Expired")
    assert {status for status, _ in (await rig.conditions(key)).values()} == {"False"}
    assert rig.events("ResourceRequest")[-1] == "Expired"


@unpeered
async def test_condition_keeps_its_transition_time_while_it_is_the_same(rig):
    key = await rig.reserve(renew=True, duration="1h")
    await passed(2 * 3600)
    found = await rig.found(key)
    assert {one.last_transition_time for one in found.status.conditions} == {make.T0}
