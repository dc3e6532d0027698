"""What others write into, and delete of, the broker's objects while it serves: it answers by its own record.

Under load from both sides, and each ends as in `test_broker_faults`.
"""

import asyncio

import pytest

import kube_broker
import kube_faults
from kube_faults import BY_OBJECT, BY_REST, eventually
from kubelend.core.errors import Conflict, InvalidInput, NotFound
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation

pytestmark = pytest.mark.timeout(240)

ANSWERS = 40


@pytest.fixture
async def loaded(kube, namespace, certificates):
    # With the lease of every broker: one that loses it while records are missing refuses to load.
    async with kube_faults.loaded(kube, namespace, certificates, lease={}) as loaded:
        yield loaded


async def edit(load, kind, name, change, subresource=""):
    """What is gone by then, or refused, was not done."""
    try:
        await load.objects.edit(kind, name, change, subresource)
    except (Conflict, NotFound, InvalidInput):
        return


async def edit_each(load, kind, change, subresource=""):
    for found in await load.listed(kind):
        await edit(load, kind, found.metadata.name, change, subresource)


async def test_constant_edits_of_all_objects_block_nothing(loaded):
    """As often as the server answers, until enough requests have been answered all the same."""
    load = loaded.load

    async def edit_all(number):
        noise = {"labels": {"turn": str(number)}, "annotations": {"turn": str(number)}}
        amounts = {"cpu": str(number), "memory": "1Gi"}
        await edit_each(load, Reservation, {"metadata": noise, "spec": {"priority": number % 9}})
        forged = {"resources": {"reserved": amounts, "available": amounts}}
        await edit_each(load, ClusterAdvertisement, {"metadata": noise, "spec": forged})

    async def fault():
        answers, number = asyncio.create_task(load.answers(ANSWERS)), 0
        while not answers.done():
            await edit_all(number := number + 1)
        await answers

    await load.check(await load.under(fault))


WIPES = [{"status": None}, {"status": {"record": None}}]


async def test_edited_objects_are_repaired_and_keep_their_reservations(loaded):
    load = loaded.load

    async def fault():
        for change in 2 * WIPES:
            for kind in (Reservation, ClusterAdvertisement):
                await edit_each(load, kind, change, "status")
            await edit_each(load, Reservation, {"metadata": {"finalizers": None}})
            await load.answers(ANSWERS // 4)

    promised = await load.under(fault)
    await eventually(lambda: are_repaired(load))
    await load.check(promised)


async def are_repaired(load):
    """All have records, but those that were refused."""
    found = [
        one.status
        for kind in (Reservation, ClusterAdvertisement)
        for one in await load.listed(kind)
    ]
    return all((one.record is not None) == (one.phase != "Failed") for one in found)


async def test_recreated_advertisements_have_their_reservations(loaded):
    load = loaded.load

    async def fault():
        for _ in range(3):
            for lender in (BY_OBJECT, BY_REST):
                await load.objects.delete(ClusterAdvertisement, f"{lender}-adv")
            await eventually(lambda: not loaded.broker.service.current()[0].clusters)
            await load.offer()

    await load.check(await load.under(fault))


@pytest.mark.parametrize(
    "kind, change",
    [("rsv-", WIPES[0]), ("last-request-", WIPES[1])],
    ids=["status of REST", "record of an object"],
)
async def test_objects_cleared_while_no_broker_runs_are_not_lent_again(
    kube, namespace, certificates, kind, change
):
    """The next one does not guess: it names the object and waits. To delete that is to give it back."""
    async with kube_faults.loaded(kube, namespace, certificates) as loaded:
        promised = await loaded.load.fill_up()
        await loaded.load.publish()  # of the last commit the head has a copy
    emptied = min(name for name in promised if name.startswith(kind))
    async with kube_broker.opened(kube, namespace) as objects:
        await objects.edit(Reservation, emptied, change, "status")
        await objects.reserve("other")
        async with kube_faults.starting(kube, namespace, certificates) as loaded:
            await eventually(lambda: says(loaded, f"Reservation {emptied}: its "))
            other = await objects.find(Reservation, "other")
            assert other is not None
            assert other.status.phase == ""
            await objects.edit(Reservation, emptied, {"metadata": {"finalizers": None}})
            await objects.delete(Reservation, emptied)
            await eventually(loaded.is_ready)
            assert await loaded.load.apply_request("other")
            await loaded.load.check(promised - {emptied} | {"other"})


async def says(loaded, what):
    return what in await loaded.readiness()
