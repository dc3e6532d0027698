"""Objects that nobody looks after: refused, gone unseen, hidden by a label, or edited all the time."""

import asyncio
import contextlib
import itertools

import pytest

import kube_broker
import make
from clocks import Clock
from kubelend.broker.service import BrokerRules
from kubelend.controllers import labels
from kubelend.controllers.reconciler import DRIFT_DEADLINE
from kubelend.core.models import ReservationId
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from waiting import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.kube, pytest.mark.broker("objects")]

RETENTION = make.HOUR
"""As brokers have it that are told nothing else."""


# -- refused


async def test_refused_wish_goes_after_the_retention_and_no_other(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "1", duration="3h")
    await broker.reserved("mine")
    await refused_one_after_the_other(broker, RETENTION)
    assert (await broker.reserved("mine")).status.target_cluster_id == "lender"


async def refused_one_after_the_other(broker, retention):
    """The first goes, and the second has time left."""
    await broker.reserve("first", "9")
    await broker.failed("first")
    broker.clock.pass_time(retention / 2)
    await broker.reserve("second", "9")
    await broker.failed("second")
    broker.clock.pass_time(retention / 2)
    await broker.gone(Reservation, "first")
    assert await broker.find(Reservation, "second") is not None
    broker.clock.pass_time(retention / 2)
    await broker.gone(Reservation, "second")


async def test_refused_wish_goes_also_after_a_restart(kube, namespace):
    clock = Clock()
    async with kube_broker.running(kube, namespace, clock) as first:
        await first.reserve("refused", "9")
        await first.failed("refused")
    clock.pass_time(RETENTION / 2)
    async with kube_broker.running(kube, namespace, clock) as second:
        assert await second.find(Reservation, "refused") is not None
        clock.pass_time(RETENTION / 2)
        await second.gone(Reservation, "refused")


async def test_refused_wish_goes_if_its_time_was_over_while_no_broker_ran(kube, namespace):
    clock = Clock()
    async with kube_broker.running(kube, namespace, clock) as first:
        await first.reserve("refused", "9")
        await first.failed("refused")
    clock.pass_time(RETENTION)
    async with kube_broker.running(kube, namespace, clock) as second:
        await second.gone(Reservation, "refused")


async def test_refusal_can_be_read_however_short_the_retention_is(kube, namespace):
    rules = BrokerRules(retention=0 * make.SECOND)
    async with kube_broker.running(kube, namespace, rules=rules) as broker:
        await refused_one_after_the_other(broker, labels.MIN_REJECTION_RETENTION)


# -- gone while nobody was watching


async def test_advertisement_deleted_while_the_broker_started_is_withdrawn(kube, namespace):
    async with kube_broker.running(kube, namespace) as first:
        await first.advertise("goes")
        await first.advertise("stays")
        await first.available("goes", "10")

    async def meanwhile(objects):
        await objects.delete(ClusterAdvertisement, "goes-adv")

    async with kube_broker.running(kube, namespace, meanwhile=meanwhile) as second:
        await second.until(lambda: "goes" not in second.ledger.clusters)
        await second.reserve("mine", "1")
        assert (await second.reserved("mine")).status.target_cluster_id == "stays"
        assert list(second.ledger.clusters) == ["stays"]


async def test_reservation_of_rest_deleted_by_force_while_the_broker_started_is_released(
    kube, namespace
):
    async with kube_broker.running(kube, namespace) as first:
        await first.advertise("lender", "4")
        gone, kept = [await first.service.reserve(make.request(key=key)) for key in ("1", "2")]
        await first.reserved(gone.id)

    async def meanwhile(objects):
        await objects.edit(Reservation, gone.id, {"metadata": {"finalizers": None}})
        await objects.delete(Reservation, gone.id)

    async with kube_broker.running(kube, namespace, meanwhile=meanwhile) as second:
        await second.until(lambda: gone.id not in second.ledger.reservations)
        assert list(second.ledger.reservations) == [kept.id]


async def test_what_is_over_needs_no_object(broker):
    """Whoever has asked over REST finds it by its name, whatever was done to the object."""
    await broker.advertise("lender", "4")
    over = await broker.service.reserve(make.request())
    await broker.reserved(over.id)
    await broker.delete(Reservation, over.id)
    await broker.gone(Reservation, over.id)
    for hear in broker.service.listeners:
        hear(None)  # look at everything
    await broker.reserve("mine", "1")
    await broker.reserved("mine")
    assert list(broker.ledger.reservations) == [over.id, "mine"]


async def test_label_of_the_archive_does_not_give_a_lock_back(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "1")
    await broker.reserved("mine")
    label = {"broker.fluidos.eu/archived": "true"}
    await broker.edit(Reservation, "mine", {"metadata": {"labels": label}})
    found = await broker.shows(Reservation, "mine", lambda one: not one.metadata.labels)
    assert found.status.phase == "Reserved"
    assert broker.ledger.reservations[ReservationId("mine")].is_live


# -- edited all the time


@contextlib.asynccontextmanager
async def edited_all_the_time(broker, name):
    """More often than it has to be left alone for until it is looked at closely."""

    async def edit():
        for number in itertools.count():
            change = {"status": {"message": f"edit {number}"}}
            await broker.edit(Reservation, name, change, "status")
            await asyncio.sleep(0.2)

    task = asyncio.create_task(edit())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_object_that_is_edited_all_the_time_is_put_right_all_the_same(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "1")
    right = (await broker.reserved("mine")).status.message
    seen = []

    async def look():
        seen.append((await broker.find(Reservation, "mine")).status.message)
        return right in seen[seen.index("edit 3") :] if "edit 3" in seen else False

    async with edited_all_the_time(broker, "mine"):
        await until(look, 4 * DRIFT_DEADLINE.total_seconds())
    await broker.shows(Reservation, "mine", lambda one: one.status.message == right)
