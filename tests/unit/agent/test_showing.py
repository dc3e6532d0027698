"""People see the newest; what others wrote on the object stays, and no trouble ends the showing."""

import asyncio
from contextlib import asynccontextmanager

from msgspec.structs import replace

from kubelend.agent.health import ComponentHealth
from kubelend.agent.publisher import AdvertisementWriter
from kubelend.core.errors import StoreFailed
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.bodies import Amounts
from kubelend.wire.objects import (
    Advertisement,
    AdvertisementSpec,
    AdvertisementStatus,
    MeasuredResources,
    Metadata,
)
from make import T0
from virtual_time import in_virtual_time, now, settled, stopped

KEY = "default/adv"


def advertisement(cpu="1", message=""):
    some = Amounts(cpu, "1Gi")
    return Advertisement(
        Metadata("adv"),
        AdvertisementSpec("a", MeasuredResources(some, some, some, some), T0),
        AdvertisementStatus(phase="Active", message=message),
    )


class TroubledObjects(MemoryObjects):
    """Can be made to fail, or to take its time."""

    is_broken = False
    seconds = 0.0
    writes = 0
    meddlers = 0
    """How often somebody else changes the object just before its status is set."""

    async def apply(self, wanted):
        self.writes += 1
        await asyncio.sleep(self.seconds)
        if self.is_broken:
            raise StoreFailed("the disk is full")
        return await super().apply(wanted)

    async def set_status(self, wanted):
        if self.meddlers:
            self.meddlers -= 1
            found = await super().find(Advertisement, KEY)
            assert found is not None
            labels = {"team": str(self.meddlers)}
            await super().apply(replace(found, metadata=replace(found.metadata, labels=labels)))
        return await super().set_status(wanted)


class Rig:
    def __init__(self):
        self.objects, self.health = TroubledObjects(now), ComponentHealth()
        self.display = AdvertisementWriter(self.objects, self.health)

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.display.run())
        yield
        await stopped(task)

    async def found(self):
        await settled()
        found = await self.objects.find(Advertisement, KEY)
        assert found is not None
        return found


@in_virtual_time
async def test_what_is_to_be_seen_is_made_and_then_changed():
    rig = Rig()
    async with rig.running():
        for cpu in ("1", "2"):
            rig.display.submit(advertisement(cpu, message=f"m{cpu}"))
            found = await rig.found()
            assert found.spec.resources.capacity.cpu == cpu
            assert found.status.message == f"m{cpu}"
    assert len(await rig.objects.list(Advertisement)) == 1


@in_virtual_time
async def test_what_others_wrote_on_it_stays():
    rig = Rig()
    marked = replace(
        advertisement(), metadata=Metadata("adv", labels={"a": "b"}, annotations={"c": "d"})
    )
    await rig.objects.apply(marked)
    async with rig.running():
        rig.display.submit(advertisement("2"))
        metadata = (await rig.found()).metadata
    assert (metadata.labels, metadata.annotations) == ({"a": "b"}, {"c": "d"})
    assert metadata.generation == 2


@in_virtual_time
async def test_one_that_somebody_deleted_is_made_anew():
    rig = Rig()
    async with rig.running():
        rig.display.submit(advertisement("1"))
        old = await rig.found()
        await rig.objects.delete(Advertisement, KEY)
        rig.display.submit(advertisement("2"))
        new = await rig.found()
    assert new.metadata.uid != old.metadata.uid
    assert new.spec.resources.capacity.cpu == "2"


@in_virtual_time
async def test_what_cannot_be_written_is_reported_until_it_can():
    rig = Rig()
    rig.objects.is_broken = True
    async with rig.running():
        rig.display.submit(advertisement("1"))
        await settled()
        assert rig.health.errors == {"advertisement": "the disk is full"}
        rig.objects.is_broken = False
        rig.display.submit(advertisement("2"))
        assert (await rig.found()).spec.resources.capacity.cpu == "2"
    assert rig.health.errors == {}


@in_virtual_time
async def test_a_write_without_end_is_given_up():
    rig = Rig()
    rig.objects.seconds = 1e6
    async with rig.running():
        rig.display.submit(advertisement("1"))
        await asyncio.sleep(11)
        assert rig.health.errors == {
            "advertisement": "Advertisement default/adv: not written within 10s"
        }
        rig.objects.seconds = 0
        rig.display.submit(advertisement("2"))
        assert (await rig.found()).spec.resources.capacity.cpu == "2"


@in_virtual_time
async def test_a_slow_write_is_followed_by_the_newest_only():
    rig = Rig()
    rig.objects.seconds = 5
    async with rig.running():
        for cpu in "1234":
            rig.display.submit(advertisement(cpu))
            await asyncio.sleep(1)
        await asyncio.sleep(20)
        assert (await rig.found()).spec.resources.capacity.cpu == "4"
    assert rig.objects.writes == 2


@in_virtual_time
async def test_a_status_is_shown_though_others_change_the_object_in_that_moment():
    rig = Rig()
    rig.objects.meddlers = 3
    async with rig.running():
        rig.display.submit(advertisement())
        found = await rig.found()
        assert (found.status.phase, found.metadata.labels) == ("Active", {"team": "0"})
        assert rig.health.errors == {}


@in_virtual_time
async def test_an_object_that_never_stays_as_it_is_becomes_a_problem():
    rig = Rig()
    rig.objects.meddlers = 1000
    async with rig.running():
        rig.display.submit(advertisement())
        await settled()
        assert "advertisement" in rig.health.errors
