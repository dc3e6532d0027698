"""`kubelend agent --cleanup`: what an agent leaves behind when it is uninstalled, whatever still works."""

from contextlib import asynccontextmanager
from datetime import timedelta

import fake_broker
import requesters
import virtual_time
from kubelend.agent.peering import PeeringReconciler
from kubelend.agent.ports import Readiness
from kubelend.apps.agent_cleanup import AgentCleanup
from kubelend.apps.agent_environment import NO_OFFER_SETTINGS, AgentEnvironment
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ReservationId
from kubelend.sources.simulation import SimulatedSource
from kubelend.sources.simulation_spec import SimulationSpec
from kubelend.wire.objects import ProviderInstruction, ReservationInstruction, ResourceRequest
from peers import FakePeering
from virtual_time import now, rig_decorator

SETTINGS = AgentSettings(cluster_id="me", cleanup=True, cleanup_timeout=timedelta(minutes=2))


class Rig(requesters.Rig):
    """A requester with a peering, that ends before the cleanup."""

    def __init__(self):
        super().__init__()
        self.peering = FakePeering()

    @asynccontextmanager
    async def running(self):
        yield

    async def borrow(self):
        """As an agent has, which is gone when this returns."""
        reconciler = PeeringReconciler(
            self.objects, self.broker, self.reservations, self.peering, self.health, now
        )
        async with (
            virtual_time.running(self.requester.run()),
            virtual_time.running(reconciler.run()),
        ):
            key = await self.create_request()
            found = self.broker.runner[ReservationId("rsv-1")]
            self.broker.runner.acknowledge(found.id, str(found.target))
            await virtual_time.passed(60)
        return key

    async def clean_up(self, broker):
        environment = AgentEnvironment(
            source=SimulatedSource(SimulationSpec(nodes=[]), now),
            objects=self.objects,
            clock=now,
            namespace="default",
            policy=None,
            offer=NO_OFFER_SETTINGS,
        )
        return await AgentCleanup(SETTINGS, environment, broker, self.peering, None).run()

    async def all(self):
        kinds = (ReservationInstruction, ProviderInstruction)
        return [one.key for kind in kinds for one in await self.objects.list(kind)]


uninstalled = rig_decorator(Rig)


@uninstalled()
async def test_borrowed_resources_are_given_back_and_no_finalizer_is_left(rig):
    key = await rig.borrow()
    assert await rig.all()
    assert rig.peering.connected
    assert await rig.clean_up(rig.broker) == []
    found = await rig.objects.find(ResourceRequest, key)
    assert (found.status.phase, found.metadata.finalizers) == ("Released", ())
    assert (await rig.all(), rig.peering.connected) == ([], set())
    await rig.objects.delete(ResourceRequest, key)
    assert await rig.objects.find(ResourceRequest, key) is None


@uninstalled()
async def test_everything_can_be_deleted_while_the_broker_is_unreachable(rig):
    key = await rig.borrow()
    rig.broker.error = fake_broker.UNREACHABLE
    [left] = await rig.clean_up(rig.broker)
    assert left == "reservations at the broker, until they expire: no route"
    found = await rig.objects.find(ResourceRequest, key)
    assert found.metadata.finalizers == ()
    assert (await rig.all(), rig.peering.connected) == ([], set())


@uninstalled()
async def test_peering_that_does_not_end_is_left_behind_after_the_timeout(rig):
    key = await rig.borrow()
    rig.peering.incomplete["disconnect"] = Readiness(False, "waiting for the provider")
    began = now()
    left = await rig.clean_up(rig.broker)
    assert left == ["peering of rsv-1: waiting for the provider"]
    assert now() - began >= SETTINGS.cleanup_timeout
    found = await rig.objects.find(ResourceRequest, key)
    assert (found.metadata.finalizers, await rig.all()) == ((), [])


@uninstalled()
async def test_reservations_of_others_are_reported_and_not_released(rig):
    rig.broker.runner.advertise("me")
    lent = rig.broker.runner.reserve("cpu=1,memory=1Gi", requester="other")
    left = await rig.clean_up(rig.broker)
    assert left == [f"reservation {lent} of other"]
    assert rig.broker.runner[lent].phase == Phase.RESERVED
