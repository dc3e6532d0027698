"""ResourceRequests over the real wire: the answer, the stream and the refusal all end in the object."""

import asyncio
import contextlib

import pytest

from kubelend.agent.health import ComponentHealth
from kubelend.agent.requester import ResourceRequestReconciler
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.agent.stream import InstructionListener
from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.kits.clock import utc_now
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.objects import (
    Metadata,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
)
from virtual_time import stopped
from waiting import until


@pytest.fixture
async def talk(broker):
    """Opens the conversation of a cluster; all are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def talk(cluster):
            options = CommunicatorOptions(
                f"https://localhost:{broker.port}", broker.certificates.cluster(cluster)
            )
            found = await factory.open_communicator("http", options)
            assert found is not None
            stack.push_async_callback(found.close)
            return found

        yield talk


@pytest.fixture
async def lenders(talk):
    found = {}
    for name, cpu in (("large", "8"), ("small", "4")):
        found[name] = await talk(name)
        offer = bodies.Metrics(bodies.Quantities(cpu, "8Gi"))
        await found[name].publish(bodies.Advertisement(name, offer))
    return found


@pytest.fixture
async def objects(talk):
    """Those of a cluster whose requester and listener run."""
    kept, reservations, health = MemoryObjects(utc_now), ReservationCache(), ComponentHealth()
    communicator = await talk("borrower")
    requester = ResourceRequestReconciler(
        kept, communicator, reservations, health, utc_now, cluster_id="borrower"
    )
    running = [
        asyncio.create_task(requester.run()),
        asyncio.create_task(InstructionListener(communicator, reservations, health).run()),
    ]
    yield kept
    await stopped(*running)


def wish(cpu):
    return ResourceRequest(Metadata("w"), ResourceRequestSpec(cpu, "1Gi"))


async def phase_is(objects, phase, target=""):
    async def shown():
        found = await objects.find(ResourceRequest, "default/w")
        return (found.status.phase, found.status.target_cluster_id) == (phase, target)

    await until(shown)
    return (await objects.find(ResourceRequest, "default/w")).status


async def says(objects, key, message):
    found = await objects.find(ReservationInstruction, key)
    return found is not None and found.spec.message == message


async def test_a_wish_is_placed_moves_with_its_provider_and_ends_with_its_object(lenders, objects):
    await objects.apply(wish("2"))
    status = await phase_is(objects, "Reserved", "large")
    await lenders["large"].refuse(status.reservation_name, "no")
    status = await phase_is(objects, "Reserved", "small")
    assert status.message == "Resources reserved in cluster small, moved there from cluster large"
    key = f"default/{status.reservation_name}"
    await until(lambda: says(objects, key, "Use small for 2 CPU / 1Gi Memory"))
    await objects.delete(ResourceRequest, "default/w")

    async def is_finished():
        found = await objects.find(ReservationInstruction, key)
        return found.status.phase == "Finished"

    await until(is_finished)
    assert await objects.find(ResourceRequest, "default/w") is None
    left = await lenders["small"].find(status.reservation_name)
    assert left.status.reason == "ReleasedByRequester"


async def test_a_refusal_says_why_and_what_would_help(lenders, objects):
    await objects.apply(wish("9"))
    status = await phase_is(objects, "Failed")
    assert (status.reason, status.message) == (
        "NoCapacity",
        "no suitable cluster: 0/2 clusters fit: 2 InsufficientCPU; "
        "large fits if you request 1 cpu less",
    )
