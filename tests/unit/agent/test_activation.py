"""What is borrowed is used when its lender has agreed, or has said nothing for long enough."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from desk_broker import DeskBroker
from joiners import SteeredPeering, passed, running
from kubelend.agent import instructions
from kubelend.agent.health import ComponentHealth
from kubelend.agent.peering import PeeringReconciler
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.sources.memory_objects import MemoryObjects
from lenders import House
from virtual_time import in_virtual_time, now, settled, stopped


@in_virtual_time
async def test_it_is_joined_at_once_and_activated_when_the_provider_has_agreed():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one", is_acknowledged=False)
        await passed(29)
        assert (await rig.status(key)).phase == "Ready"
        assert (rig.peering.joined, rig.broker.activated) == ({("rsv-1", "one")}, [])
        rig.tell("rsv-1", "one", "Reserved", is_acknowledged=True)
        await settled()
        assert rig.broker.activated == ["rsv-1"]
        assert rig.problem == ""


@in_virtual_time
async def test_a_provider_that_never_answers_has_half_a_minute_from_when_it_is_ready():
    async with running() as rig:
        rig.peering.seconds["connect"] = 20
        await rig.instruct("rsv-1", "one", is_acknowledged=False)
        rig.peering.seconds.clear()
        await passed(49)
        assert rig.broker.activated == []
        await passed(1)
        assert rig.broker.activated == ["rsv-1"]


@in_virtual_time
async def test_news_of_something_else_do_not_give_it_more_time():
    async with running() as rig:
        await rig.instruct("rsv-1", "one", is_acknowledged=False)
        for _ in range(2):
            await passed(10)
            rig.tell("rsv-1", "one", "Reserved", is_acknowledged=False)
        await passed(10)
        assert rig.broker.activated == ["rsv-1"]


@in_virtual_time
async def test_the_next_provider_has_its_own_time():
    async with running() as rig:
        await rig.instruct("rsv-1", "one", is_acknowledged=False)
        await passed(20)
        await rig.instruct("rsv-1", "two", is_acknowledged=False)
        await passed(29)
        assert rig.broker.activated == []
        await passed(1)
        assert rig.broker.activated == ["rsv-1"]


@in_virtual_time
async def test_one_made_anew_has_its_own_time():
    async with running() as rig:
        key = await rig.instruct("rsv-1", "one", is_acknowledged=False)
        await passed(20)
        await rig.delete(key)
        await rig.instruct("rsv-1", "one", is_acknowledged=False)
        await passed(29)
        assert rig.broker.activated == []
        await passed(1)
        assert rig.broker.activated == ["rsv-1"]


@in_virtual_time
async def test_one_that_hangs_is_tried_again():
    async with running() as rig:
        rig.broker.hangs = True
        await rig.instruct("rsv-1", "one")
        await passed(10)
        assert "did not answer within 10s" in rig.problem
        rig.broker.hangs = False
        await passed(60)
        assert rig.known("rsv-1").status.phase == "Active"


@pytest.mark.parametrize("seconds", [0, 1, 20], ids=["at once", "late", "very late"])
def test_a_provider_can_refuse_however_quickly_the_clusters_are_joined(seconds):
    @in_virtual_time
    async def test():
        house = House(nodes="cpu=1,memory=1Gi")
        house.broker.seconds["refuse"] = seconds
        borrower = Borrower(DeskBroker("r", house.broker.desk))
        async with house.lending(), borrower.joining():
            found = house.broker.desk.reserve("cpu=3,memory=1Gi", excluded=["other"])
            await borrower.tell(found)
            assert borrower.peering.joined == {(found, "me")}
            await house.tell(found)
            await passed(seconds)
            assert list(house.broker.reasons) == [found]
            assert borrower.broker.body(found).status.reason == "ProviderRefused"
            await borrower.tell(found)
            assert borrower.peering.joined == set()
            assert borrower.broker.named("activate") == []

    test()


@in_virtual_time
async def test_a_provider_that_agrees_is_used():
    house = House()
    borrower = Borrower(DeskBroker("r", house.broker.desk))
    async with house.lending(), borrower.joining():
        found = house.reserve()
        await borrower.tell(found)
        await house.tell(found)
        await borrower.tell(found)
        assert house.is_acknowledged(found)
        assert borrower.broker.body(found).status.phase == "Active"


class Borrower:
    """The other side of a house: a keeper of peerings, at the same broker."""

    def __init__(self, broker):
        self.broker = broker
        self.peering = SteeredPeering()
        self.objects = MemoryObjects(now)
        self.reservations = ReservationCache()
        self.keeper = PeeringReconciler(
            self.objects, broker, self.reservations, self.peering, ComponentHealth(), now
        )

    async def tell(self, reservation):
        """The broker's word arrives, and is written down."""
        body = self.broker.body(reservation)
        self.reservations.put(body)
        if body.status.phase == "Reserved":
            wanted = instructions.reservation_instruction(body, "default")
            await self.objects.apply(wanted)
        await settled()

    @asynccontextmanager
    async def joining(self):
        task = asyncio.create_task(self.keeper.run())
        await settled()
        try:
            yield
        finally:
            await stopped(task)
