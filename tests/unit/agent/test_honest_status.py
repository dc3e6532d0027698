"""A ResourceRequest says what can be used, and how far it is: phase, conditions and Events, peered or not."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import fake_broker
import make
import requesters
import virtual_time
from kubelend.agent import conditions
from kubelend.agent.peering import PEERING_FINALIZER, PeeringReconciler
from kubelend.agent.ports import Readiness
from kubelend.core.errors import Unavailable
from kubelend.core.models import HoldReport, ReservationId
from kubelend.wire import bodies
from kubelend.wire.events import EventRecord
from kubelend.wire.objects import (
    Metadata,
    ReservationInstruction,
    ReservationInstructionSpec,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from peers import FakePeering
from virtual_time import now, passed, rig_decorator, settled, stopped

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

    @asynccontextmanager
    async def running(self):
        async with super().running(), virtual_time.running(self.peerings.run()):
            yield

    async def reserve(self, **spec):
        key = await self.create_request(**spec)
        await self.acknowledge()
        return key

    async def acknowledge(self, reservation="rsv-1", held=None):
        found = self.broker.runner[ReservationId(reservation)]
        self.broker.runner.acknowledge(found.id, str(found.target), held)
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


unpeered = rig_decorator(lambda: Rig(None))()
peered = rig_decorator(lambda: Rig(FakePeering()))()


# -- without a peering


@unpeered
async def test_request_and_instruction_without_a_peering_say_so(rig):
    key = await rig.reserve()
    await passed(600)
    status = await rig.expect(key, "Reserved")
    assert status.message == f"Resources reserved in cluster p1; {NO_PEERING}"
    assert await rig.conditions(key) == {
        "Reserved": ("True", "Reserved"),
        "Peered": ("False", "NoPeering"),
        "Ready": ("False", "NoPeering"),
    }
    use = await rig.use()
    assert (use.status.phase, use.status.message) == ("NotPeered", NO_PEERING)
    assert (use.status.peered_cluster_ids, use.status.started_cluster_ids) == ((), ())
    assert use.metadata.finalizers == ()
    assert (rig.broker.named("activate"), rig.health.errors) == ([], {})
    rig.broker.runner.activate(ReservationId("rsv-1"))
    await rig.notify("rsv-1")
    await rig.expect(key, "Active")
    told = await rig.conditions(key)
    assert (told["Peered"], told["Ready"]) == (("False", "NoPeering"), ("True", "Activated"))
    await rig.delete(key)
    await settled()
    steps = ["Requested", "Reserved", "NoPeering", "Ready", "Active", "Released"]
    assert sorted(rig.events("ResourceRequest")) == sorted(steps)
    assert rig.events("ReservationInstruction") == ["Delivered", "NoPeering", "Ready", "Finished"]


# -- what the provider holds


@unpeered
async def test_report_of_the_provider_is_a_condition_and_an_event_of_both_objects(rig):
    key = await rig.reserve()
    assert "Held" not in await rig.conditions(key)
    for report, status in (
        (HoldReport(False, "PartiallyHeld", "1 CPU of 4 CPU held"), "False"),
        (HoldReport(True, "Held", "4 CPU held"), "True"),
        (HoldReport(False, "Overcommitted", "1 CPU is used"), "False"),
    ):
        with capture_logs() as logs:
            await rig.acknowledge(held=report)
        [line] = [one for one in logs if one["event"] == "Provider reported its hold"]
        assert line["log_level"] == ("info" if report.is_held else "warning")
        assert (await rig.conditions(key))["Held"] == (status, report.reason)
        [told] = [one for one in (await rig.use()).status.conditions if one.type == "Held"]
        assert (told.status, told.reason, told.message) == (status, report.reason, report.message)
    reasons = ["PartiallyHeld", "Held", "Overcommitted"]
    for kind in ("ResourceRequest", "ReservationInstruction"):
        assert [one for one in rig.events(kind) if one in reasons] == reasons
    await rig.delete(key)
    await settled()
    [over] = [one for one in (await rig.use()).status.conditions if one.type == "Held"]
    assert (over.status, over.reason) == ("False", "Finished")


# -- with a peering


@peered
async def test_request_is_active_and_ready_while_its_node_is(rig):
    rig.peering.unready["rsv-1"] = "no virtual node yet"
    key = await rig.reserve()
    await passed(1)
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
    rig.peering.unready["rsv-1"] = "node lost"
    await passed(61)
    told = await rig.conditions(key)
    assert (told["Peered"], told["Ready"]) == (("True", "Connected"), ("False", "NodeNotReady"))
    assert rig.events("ResourceRequest")[-1] == "NotReady"


@peered
async def test_cluster_is_named_as_peered_only_when_it_is(rig):
    rig.peering.errors["connect"] = DOWN
    key = await rig.reserve()
    status = (await rig.use()).status
    assert (status.peered_cluster_ids, status.started_cluster_ids) == ((), ("p1",))
    told = await rig.conditions(key)
    assert told["Peered"] == told["Ready"] == ("False", "PeeringFailed")
    await passed(600)
    for kind in ("ResourceRequest", "ReservationInstruction"):
        assert rig.events(kind).count("PeeringFailed") == 1
    rig.peering.errors.clear()
    await passed(60)
    assert (await rig.use()).status.peered_cluster_ids == ("p1",)
    assert (await rig.conditions(key))["Peered"] == ("True", "Connected")


@peered
async def test_failover_is_unready_until_the_new_provider_is_connected(rig):
    key = await rig.reserve()
    await passed(1)
    await rig.expect(key, "Active")
    rig.peering.errors["connect p2"] = DOWN
    rig.broker.runner.drain("p1")
    await rig.notify("rsv-1")
    await settled()
    await rig.expect(key, "Reserved", target_cluster_id="p2")
    told = await rig.conditions(key)
    assert told["Peered"] == told["Ready"] == ("False", "PeeringFailed")
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


# -- pure


def shown(target, use, phase="Reserved"):
    """Peered and Ready of a request with this provider, by the instruction."""
    found = ResourceRequest(Metadata("w", generation=3), ResourceRequestSpec("1", "1Gi"))
    status = ResourceRequestStatus(phase, target, "rsv-1", message="Resources reserved")
    after = conditions.apply_request_conditions(found, status, use, make.T0)
    return [(one.status, one.reason) for one in after.conditions[1:]]


def instruction(target, report):
    """One whose peering has reported this about `p1`."""
    spec = ReservationInstructionSpec("1", "1Gi", reservation_name="rsv-1", target_cluster_id="p1")
    found = ReservationInstruction(Metadata("rsv-1"), spec)
    status = conditions.apply_report(found, "p1", report, make.T0)
    return replace(found, spec=replace(spec, target_cluster_id=target), status=status)


READY = conditions.report_readiness(Readiness(is_ready=True, reason="node ready", node="n"))


def test_conditions_of_the_previous_provider_are_not_those_of_the_next():
    assert shown("p1", instruction("p1", READY)) == [("True", "Connected"), ("True", "NodeReady")]
    connecting = [("False", "Connecting")] * 2
    assert shown("p2", instruction("p2", READY)) == connecting, "not reported on yet"
    assert shown("p2", instruction("p1", READY)) == connecting, "not instructed yet"
    assert shown("p1", None) == connecting


def test_activation_ends_with_the_phase():
    use = instruction("p1", conditions.report_no_peering(is_active=True))
    assert shown("p1", use, "Active")[1] == ("True", "Activated")
    assert shown("p1", use, "Reserved")[1] == ("False", "Connecting")


def test_node_is_recorded_and_failure_keeps_what_is_known_of_the_peering():
    use = instruction("p1", READY)
    assert use.status.node_name == "n"
    failed = conditions.apply_report(use, "p1", conditions.report_failure(DOWN), make.T0)
    assert failed.peered_cluster_ids == ("p1",)
    assert conditions.is_true(failed.conditions, "Peered")
    assert not conditions.is_true(failed.conditions, "Ready")


def test_reports_of_the_peering_and_of_the_hold_do_not_undo_each_other():
    """They are written by two reconcilers, each of which wakes the other one up."""
    report = bodies.HoldReport(held=True, reason="Held", message="all")
    use = instruction("p1", READY)
    held = conditions.apply_hold_report(use, report, make.T0)
    use = replace(use, status=replace(use.status, conditions=held))
    assert conditions.apply_report(use, "p1", READY, make.T0) == use.status
    assert conditions.apply_hold_report(use, report, make.T0) == held


# -- requests that are not reserved


@pytest.mark.parametrize(
    "spec, reason, events",
    [
        ({"cpu": "99"}, "NoCapacity", ["Requested", "Rejected"]),
        ({"cpu": "two"}, "InvalidQuantity", ["Rejected"]),
        ({"cpu": "99", "wait": "10m"}, "Waiting", ["Requested", "Queued"]),
        ({}, "BrokerUnreachable", ["Requested", "BrokerUnreachable"]),
    ],
    ids=["rejected", "invalid", "queued", "unreachable"],
)
@unpeered
async def test_request_that_is_not_reserved_has_the_reason(rig, spec, reason, events):
    rig.broker.error = None if spec else fake_broker.UNREACHABLE
    key = await rig.create_request(**spec)
    await passed(300)
    assert await rig.conditions(key) == {
        "Reserved": ("False", reason),
        "Peered": ("False", "NotReserved"),
        "Ready": ("False", "NotReserved"),
    }
    assert rig.events("ResourceRequest") == events


@unpeered
async def test_expiry_is_an_event_and_ends_all_conditions(rig):
    key = await rig.reserve(duration="1h")
    await passed(3601)
    await rig.expect(key, "Expired")
    assert {status for status, _ in (await rig.conditions(key)).values()} == {"False"}
    assert rig.events("ResourceRequest")[-1] == "Expired"


@peered
async def test_conditions_are_about_the_current_spec_and_renewals_do_not_change_them(rig):
    key = await rig.reserve(duration="1h")
    await rig.change(key, renew=True)
    await passed(5 * 3600)
    assert (await rig.conditions(key))["Ready"] == ("True", "NodeReady")
    found = await rig.found(key)
    assert (found.metadata.generation, found.status.observed_generation) == (2, 2)
    assert {one.last_transition_time for one in found.status.conditions} == {make.T0}
