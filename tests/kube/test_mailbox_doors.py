"""Mailboxes that open and close, and single objects in them with which nothing can be done."""

import asyncio
import contextlib

import msgspec
import pytest
from structlog.testing import capture_logs

import make
from kube_stores import connecting
from kubelend.core import audit
from kubelend.core.errors import Gone
from kubelend.kube import config, resources
from kubelend.kube.client import Client
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation, ReservationSpec
from kubelend.wire.objects import Metadata
from waiting import PATIENCE, until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(120)]

SOME = bodies.Quantities("1", "1Gi")
WISH = bodies.ReservationRequest(SOME, duration="1h")
RESERVATIONS = resources.resource_for(Reservation)


@pytest.fixture
async def admin(kube):
    async with Client.open(config.config_from_kubeconfig(kube.admin_kubeconfig)) as client:
        yield client


@pytest.fixture
async def lender(broker):
    """There is something to be had."""
    await broker.cluster("bonn").advertise()


def ledger(broker):
    found, _ = broker.service.current()
    return found


@contextlib.asynccontextmanager
async def talking(office, namespace):
    found = await office.open(namespace)
    try:
        yield found
    finally:
        await found.close()


async def wish(admin, namespace, name="w"):
    """What a person asks for."""
    made = Reservation(Metadata(name, namespace), ReservationSpec(SOME, duration="1h"))
    return await admin.create(RESERVATIONS, made)


async def until_it(admin, name, namespace, wanted):
    async def look():
        return wanted(await admin.find(RESERVATIONS, name, namespace))

    await until(look)


def is_answered(found):
    return found.status.response is not None


def is_held(found):
    return RESERVATION_FINALIZER in found.metadata.finalizers


# -- single objects


async def test_reservation_with_more_labels_than_an_object_takes_is_shown(office, broker):
    """A ledger may have some from before there was a limit."""
    labels = {f"l{n}": "v" for n in range(65)}
    record = await broker.service.reserve(
        make.request(requester="rome", labels=labels, wait=make.MINUTE)
    )
    async with office.attended(broker.service), talking(office, office.create("rome")) as rome:
        assert (await rome.find(record.id)).status.phase == "Pending"


async def test_what_cannot_be_put_into_words_is_left_alone_and_said_once(
    office, broker, lender, admin
):
    async def granting(record, _):
        if record.request.priority == 7:
            raise msgspec.ValidationError("no such words")
        return ""

    rome = office.create("rome")
    with capture_logs() as logs:
        async with (
            office.attended(broker.service, granting=granting),
            talking(office, rome) as talk,
        ):
            spoilt = Reservation(Metadata("spoilt", rome), ReservationSpec(SOME, priority=7))
            await admin.create(RESERVATIONS, spoilt)
            await until(lambda: len(ledger(broker).reservations) == 1)
            assert (await talk.request(WISH, "k")).status.phase == "Reserved"
            await broker.service.load()  # which has every object looked at again
            await talk.ping()
            found = await admin.find(RESERVATIONS, "spoilt", rome)
            assert found.status.response is None
            assert len(ledger(broker).reservations) == 2
    said = [
        one["name"] for one in logs if one["event"] == "Skipping object that cannot be processed"
    ]
    assert sorted(set(said)) == sorted(said)
    assert f"{rome}/spoilt" in said


async def test_object_that_is_gone_before_it_is_held_on_to_reserves_nothing(
    office, broker, lender, admin
):
    rome = office.create("rome")

    async def too_late(write):
        try:
            await admin.delete(RESERVATIONS, "w", rome)
        except asyncio.CancelledError:
            write.close()
            raise
        return await write

    await wish(admin, rome)
    async with office.attended(broker.service, connect=connecting(too_late)):
        await until_it(admin, "w", rome, lambda found: found is None)
        async with talking(office, rome) as talk:
            await talk.ping()
    assert ledger(broker).reservations == {}


# -- opening


async def test_what_was_asked_before_a_namespace_became_a_mailbox_is_answered(
    office, broker, lender, admin
):
    rome = office.create("rome", labelled=False)
    async with office.attended(broker.service), talking(office, office.create("bonn")) as bonn:
        await wish(admin, rome)
        await bonn.ping()
        assert not is_answered(await admin.find(RESERVATIONS, "w", rome))
        office.label(rome, "rome")
        await until_it(admin, "w", rome, is_answered)
        [record] = ledger(broker).reservations.values()
        assert record.requester == "rome"


async def test_what_went_unseen_before_a_namespace_became_a_mailbox_is_not_attended_to(
    office, broker, lender, admin
):
    blind, seen, relisted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Blind(Client):
        async def list(self, resource, *arguments, **named):
            found = await super().list(resource, *arguments, **named)
            if blind.is_set() and resource.kind == "Reservation":
                relisted.set()
            return found

        async def watch(self, resource, *arguments, **named):
            async with contextlib.aclosing(super().watch(resource, *arguments, **named)) as events:
                async for event in events:
                    if event.found is not None and event.found.metadata.namespace == rome:
                        if blind.is_set():
                            raise Gone("too old")
                        seen.set()
                    yield event

    rome = office.create("rome", labelled=False)
    async with office.attended(broker.service, connect=Blind.open):
        async with talking(office, office.create("bonn")) as bonn:
            await bonn.ping()
        await wish(admin, rome)
        await asyncio.wait_for(seen.wait(), PATIENCE)
        blind.set()
        await admin.delete(RESERVATIONS, "w", rome)
        await asyncio.wait_for(relisted.wait(), PATIENCE)
        blind.clear()
        office.label(rome, "rome")
        async with talking(office, rome) as talk:
            await talk.ping()
            assert await talk.instructions() == []
    assert ledger(broker).reservations == {}


# -- closing


async def test_mailbox_that_closes_lets_go_and_keeps_what_was_reserved(
    office, broker, lender, admin
):
    rome = office.create("rome")
    async with office.attended(broker.service):
        await wish(admin, rome)
        await wish(admin, rome, "other")
        for name in ("w", "other"):
            await until_it(admin, name, rome, lambda one: is_answered(one) and is_held(one))
        office.label(rome, "")
        for name in ("w", "other"):
            await until_it(admin, name, rome, lambda one: not is_held(one))
        await admin.delete(RESERVATIONS, "other", rome)
        assert await admin.find(RESERVATIONS, "other", rome) is None
        assert {one.phase for one in ledger(broker).reservations.values()} == {"Reserved"}
        office.label(rome, "rome")
        await until_it(admin, "w", rome, is_held)
        async with talking(office, rome) as talk:
            assert len(await talk.instructions()) == 2
            await admin.delete(RESERVATIONS, "w", rome)
            await until(lambda: "Released" in phases(broker))
        assert sorted(phases(broker)) == ["Released", "Reserved"]
        assert audit.invariant_violations(ledger(broker)) == []


def phases(broker):
    return [one.phase.value for one in ledger(broker).reservations.values()]


async def test_mailbox_that_was_closed_while_nobody_looked_is_let_go(office, broker, lender, admin):
    rome = office.create("rome")
    async with office.attended(broker.service):
        async with talking(office, rome) as talk:
            found = await talk.request(WISH, "k")
        name = cluster_namespaces.request_object_name("k")
        assert is_held(await admin.find(RESERVATIONS, name, rome))
    office.label(rome, "")
    foreign = Metadata("foreign", rome, finalizers=(RESERVATION_FINALIZER,))
    await admin.create(RESERVATIONS, Reservation(foreign, ReservationSpec(SOME)))
    async with office.attended(broker.service):
        await until_it(admin, name, rome, lambda one: not is_held(one))
        assert is_held(await admin.find(RESERVATIONS, "foreign", rome))
    assert ledger(broker).reservations[found.id].phase == "Reserved"


async def test_mailbox_of_another_cluster_now_shows_nothing_of_the_one_before(
    office, broker, lender, admin
):
    mail = office.create("rome")
    async with office.attended(broker.service):
        async with talking(office, mail) as talk:
            found = await talk.request(WISH, "k")
        office.label(mail, "bonn")
        name = cluster_namespaces.request_object_name("k")
        await until_it(admin, name, mail, lambda one: one is None)
        async with talking(office, mail) as talk:
            [held] = await talk.instructions()
            assert (held.id, held.requester_id) == (found.id, "rome")
    assert ledger(broker).reservations[found.id].phase == "Reserved"
