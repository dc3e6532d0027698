"""Requests in cluster namespaces: idempotency keys, deletions, and changes of the namespace's label."""

import asyncio
import contextlib

import msgspec
import pytest
from structlog.testing import capture_logs

import make
from callers import request_body
from failing_store import FailingStore
from kube_stores import connecting
from kubelend.core import audit
from kubelend.core.errors import Gone, KeyReused, QueueFull, StoreFailed
from kubelend.kube import resources
from kubelend.kube.client import Client
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation, ReservationSpec
from kubelend.wire.objects import Metadata
from waiting import PATIENCE, until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(120)]

KEY = "resourcerequest-1"
SOME, MORE = bodies.Quantities("1", "1Gi"), bodies.Quantities("2", "1Gi")
RESERVATIONS = resources.resource_for(Reservation)
RETENTION = make.HOUR


@pytest.fixture
def rome(tenants):
    return tenants.create("rome")


@pytest.fixture
async def account(tenants, rome):
    """What the cluster's account may do in its namespace."""
    async with tenants.account(rome) as client:
        yield client


async def held(broker):
    """What rome has asked for over REST, and uses."""
    await broker.cluster("bonn").advertise()
    answer = await broker.cluster("rome").post("reservations", request_body(duration="3h"), key=KEY)
    assert answer.status == 201
    return answer.json["id"]


async def phase(broker, reservation):
    return (await broker.cluster("rome").get("reservations", reservation)).json["status"]["phase"]


def request_object(name, namespace, amounts=SOME, **metadata):
    known = Metadata(
        name, namespace, annotations={cluster_namespaces.IDEMPOTENCY_ANNOTATION: KEY}, **metadata
    )
    return Reservation(known, ReservationSpec(amounts, duration="3h"))


async def until_object(client, name, namespace, condition):
    found = None

    async def look():
        nonlocal found
        found = await client.find(RESERVATIONS, name, namespace)
        return condition(found)

    await until(look)
    return found


async def is_deleted(client, name, namespace):
    await until_object(client, name, namespace, lambda found: found is None)


async def rejection(client, name, namespace):
    found = await until_object(client, name, namespace, lambda one: one and is_answered(one))
    assert found.status.instruction is None
    return found.status.reason


@pytest.mark.parametrize("by_hand", [False, True], ids=["by time", "by hand"])
async def test_copied_request_with_other_amounts_keeps_the_first_ones_reservation(
    tenants, broker, rome, account, by_hand
):
    await broker.cluster("bonn").advertise()
    async with tenants.served_by(broker.service), tenants.agent(rome) as agent:
        found = await agent.request(bodies.ReservationRequest(SOME, duration="3h"), KEY)
        await account.create(RESERVATIONS, request_object("copy", rome, MORE))
        assert await rejection(account, "copy", rome) == "KeyReused"
        if by_hand:
            await account.delete(RESERVATIONS, "copy", rome)
        broker.clock.pass_time(RETENTION)
        await is_deleted(account, "copy", rome)
        assert await phase(broker, found.id) == "Reserved"
        assert [one.id for one in await agent.instructions()] == [found.id]


async def test_agent_that_deletes_its_rejected_request_keeps_the_reservation(
    tenants, broker, rome, account
):
    async with tenants.served_by(broker.service), tenants.agent(rome) as agent:
        reservation = await held(broker)
        assert [one.id for one in await agent.instructions()] == [reservation]
        with pytest.raises(KeyReused):
            await agent.request(bodies.ReservationRequest(MORE, duration="3h"), KEY)
        await is_deleted(account, cluster_namespaces.request_object_name(KEY), rome)
        assert await phase(broker, reservation) == "Reserved"


async def test_deleted_request_releases_a_decision_without_a_response(
    tenants, broker, rome, account
):
    """The broker ended in between; the next one finds the object with its finalizer, and deleted."""
    reservation = await held(broker)
    await account.create(
        RESERVATIONS, request_object("asked", rome, finalizers=(RESERVATION_FINALIZER,))
    )
    await account.delete(RESERVATIONS, "asked", rome)
    async with tenants.served_by(broker.service):
        await is_deleted(account, "asked", rome)
        assert await phase(broker, reservation) == "Released"


async def test_deleted_request_keeps_the_reservation_of_another_pending_one(
    tenants, broker, rome, account
):
    reservation = await held(broker)
    for name in ("asked", "copy"):
        held_on = request_object(name, rome, finalizers=(RESERVATION_FINALIZER,))
        await account.create(RESERVATIONS, held_on)
    await account.delete(RESERVATIONS, "copy", rome)
    async with tenants.served_by(broker.service):
        await is_deleted(account, "copy", rome)
        assert await phase(broker, reservation) == "Reserved"


class OutdatedStore(FailingStore):
    """Another broker may have written to it; nothing has met that yet."""

    is_outdated = False

    def check_fencing(self):
        if self.is_outdated:
            raise StoreFailed("another broker has written")


async def test_deleted_request_stays_while_another_broker_may_have_its_reservation(
    tenants, start, rome, account
):
    store = OutdatedStore()
    broker = await start(open_store=lambda: store)
    await broker.cluster("bonn").advertise()
    async with tenants.served_by(broker.service), tenants.agent(rome) as agent:
        await agent.request(bodies.ReservationRequest(SOME, duration="3h"), KEY)
        for name in ("deleted", "later"):
            await account.create(RESERVATIONS, request_object(name, rome, MORE))
            assert await rejection(account, name, rome) == "KeyReused"
            if name == "deleted":
                store.is_outdated = True
                await account.delete(RESERVATIONS, name, rome)
        assert await account.find(RESERVATIONS, "deleted", rome) is not None
        store.is_outdated = False
        await is_deleted(account, "deleted", rome)


@pytest.mark.broker(max_waiting=1)
async def test_request_that_the_broker_tries_again_by_itself_blocks_nothing_else(
    tenants, broker, rome, account
):
    waiting = bodies.ReservationRequest(MORE, wait="1h")
    async with tenants.served_by(broker.service), tenants.agent(rome) as agent:
        first = await agent.request(waiting, "first")
        with pytest.raises(QueueFull):
            await agent.request(waiting, "second")
        await agent.ping()
        assert await agent.instructions() == [first]
        name = cluster_namespaces.request_object_name("second")
        found = await account.find(RESERVATIONS, name, rome)
        [condition] = found.status.conditions
        assert (condition.type, condition.status, condition.reason) == (
            *("Accepted", "Unknown"),
            "QueueFull",
        )
        await agent.release(first.id)
        await until_object(account, name, rome, lambda one: one.status.phase == "Pending")
        assert (await agent.request(waiting, "second")).status.phase == "Pending"


async def test_conditions_of_users_are_not_lost_when_the_broker_writes_its_own(
    tenants, broker, rome, account, kube_client
):
    """The user sets one while the broker processes the object."""
    await broker.cluster("bonn").advertise()
    change = {"status": {"conditions": [{"type": "RequesterActive", "status": "True"}]}}
    writes = []

    async def meanwhile(write):
        writes.append(write)
        if len(writes) == 1:
            await kube_client.patch(RESERVATIONS, "w", rome, change, subresource="status")
        return await write

    known = Metadata("w", rome, finalizers=(RESERVATION_FINALIZER,))
    await kube_client.create(RESERVATIONS, Reservation(known, ReservationSpec(SOME)))
    async with tenants.served_by(broker.service, connect=connecting(meanwhile)):
        await until_object(account, "w", rome, lambda one: one.status.phase == "Active")


# -- labels and single objects

REQUEST = bodies.ReservationRequest(SOME, duration="1h")


@pytest.fixture
async def lender(broker):
    """There is something to be had."""
    await broker.cluster("bonn").advertise()


def ledger(broker):
    found, _ = broker.service.current()
    return found


async def apply_request(kube_client, namespace, name="w"):
    """What a person asks for."""
    made = Reservation(Metadata(name, namespace), ReservationSpec(SOME, duration="1h"))
    return await kube_client.create(RESERVATIONS, made)


def is_answered(found):
    return bool(found.status.conditions)


def is_held(found):
    return RESERVATION_FINALIZER in found.metadata.finalizers


# -- single objects


async def test_reservation_with_more_labels_than_an_object_takes_is_shown(tenants, broker):
    """A ledger may have some from before there was a limit."""
    labels = {f"l{n}": "v" for n in range(65)}
    record = await broker.service.reserve(
        make.request(requester="rome", labels=labels, wait=make.MINUTE)
    )
    async with tenants.served_by(broker.service), tenants.agent(tenants.create("rome")) as rome:
        assert (await rome.find(record.id)).status.phase == "Pending"


async def test_object_that_cannot_be_processed_is_skipped_and_logged_once(
    tenants, broker, lender, kube_client
):
    async def granting(record, _):
        if record.request.priority == 7:
            raise msgspec.ValidationError("no such words")
        return ""

    rome = tenants.create("rome")
    with capture_logs() as logs:
        async with (
            tenants.served_by(broker.service, granting=granting),
            tenants.agent(rome) as talk,
        ):
            corrupt = Reservation(Metadata("corrupt", rome), ReservationSpec(SOME, priority=7))
            await kube_client.create(RESERVATIONS, corrupt)
            await until(lambda: len(ledger(broker).reservations) == 1)
            assert (await talk.request(REQUEST, "k")).status.phase == "Reserved"
            await broker.service.load()  # which has every object looked at again
            await talk.ping()
            found = await kube_client.find(RESERVATIONS, "corrupt", rome)
            assert found.status.instruction is None
            assert len(ledger(broker).reservations) == 2
    said = [
        one["name"] for one in logs if one["event"] == "Skipping object that cannot be processed"
    ]
    assert sorted(set(said)) == sorted(said)
    assert f"{rome}/corrupt" in said


async def test_object_deleted_before_it_has_the_finalizer_reserves_nothing(
    tenants, broker, lender, kube_client
):
    rome = tenants.create("rome")

    async def too_late(write):
        try:
            await kube_client.delete(RESERVATIONS, "w", rome)
        except asyncio.CancelledError:
            write.close()
            raise
        return await write

    await apply_request(kube_client, rome)
    async with tenants.served_by(broker.service, connect=connecting(too_late)):
        await is_deleted(kube_client, "w", rome)
        async with tenants.agent(rome) as talk:
            await talk.ping()
    assert ledger(broker).reservations == {}


# -- opening


async def test_requests_from_before_the_label_are_answered(tenants, broker, lender, kube_client):
    rome = tenants.create("rome", labelled=False)
    async with tenants.served_by(broker.service), tenants.agent(tenants.create("bonn")) as bonn:
        await apply_request(kube_client, rome)
        await bonn.ping()
        assert not is_answered(await kube_client.find(RESERVATIONS, "w", rome))
        tenants.label(rome, "rome")
        await until_object(kube_client, "w", rome, is_answered)
        [record] = ledger(broker).reservations.values()
        assert record.requester == "rome"


async def test_objects_deleted_before_the_label_are_ignored(tenants, broker, lender, kube_client):
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

    rome = tenants.create("rome", labelled=False)
    async with tenants.served_by(broker.service, connect=Blind.open):
        async with tenants.agent(tenants.create("bonn")) as bonn:
            await bonn.ping()
        await apply_request(kube_client, rome)
        await asyncio.wait_for(seen.wait(), PATIENCE)
        blind.set()
        await kube_client.delete(RESERVATIONS, "w", rome)
        await asyncio.wait_for(relisted.wait(), PATIENCE)
        blind.clear()
        tenants.label(rome, "rome")
        async with tenants.agent(rome) as talk:
            await talk.ping()
            assert await talk.instructions() == []
    assert ledger(broker).reservations == {}


# -- closing


async def test_removed_label_removes_finalizers_and_keeps_reservations(
    tenants, broker, lender, kube_client
):
    rome = tenants.create("rome")
    async with tenants.served_by(broker.service):
        await apply_request(kube_client, rome)
        await apply_request(kube_client, rome, "other")
        for name in ("w", "other"):
            await until_object(
                kube_client, name, rome, lambda one: is_answered(one) and is_held(one)
            )
        tenants.label(rome, "")
        for name in ("w", "other"):
            await until_object(kube_client, name, rome, lambda one: not is_held(one))
        await kube_client.delete(RESERVATIONS, "other", rome)
        assert await kube_client.find(RESERVATIONS, "other", rome) is None
        assert {one.phase for one in ledger(broker).reservations.values()} == {"Reserved"}
        tenants.label(rome, "rome")
        await until_object(kube_client, "w", rome, is_held)
        async with tenants.agent(rome) as talk:
            assert len(await talk.instructions()) == 2
            await kube_client.delete(RESERVATIONS, "w", rome)
            await until(lambda: "Released" in phases(broker))
        assert sorted(phases(broker)) == ["Released", "Reserved"]
        assert audit.invariant_violations(ledger(broker)) == []


def phases(broker):
    return [one.phase.value for one in ledger(broker).reservations.values()]


async def test_label_removed_while_no_broker_ran_removes_finalizers(
    tenants, broker, lender, kube_client
):
    rome = tenants.create("rome")
    async with tenants.served_by(broker.service):
        async with tenants.agent(rome) as talk:
            found = await talk.request(REQUEST, "k")
        name = cluster_namespaces.request_object_name("k")
        assert is_held(await kube_client.find(RESERVATIONS, name, rome))
    tenants.label(rome, "")
    foreign = Metadata("foreign", rome, finalizers=(RESERVATION_FINALIZER,))
    await kube_client.create(RESERVATIONS, Reservation(foreign, ReservationSpec(SOME)))
    async with tenants.served_by(broker.service):
        await until_object(kube_client, name, rome, lambda one: not is_held(one))
        assert is_held(await kube_client.find(RESERVATIONS, "foreign", rome))
    assert ledger(broker).reservations[found.id].phase == "Reserved"


async def test_namespace_of_another_cluster_shows_nothing_of_the_previous_one(
    tenants, broker, lender, kube_client
):
    mail = tenants.create("rome")
    async with tenants.served_by(broker.service):
        async with tenants.agent(mail) as talk:
            found = await talk.request(REQUEST, "k")
        tenants.label(mail, "bonn")
        name = cluster_namespaces.request_object_name("k")
        await is_deleted(kube_client, name, mail)
        async with tenants.agent(mail) as talk:
            [held] = await talk.instructions()
            assert (held.id, held.requester_id) == (found.id, "rome")
    assert ledger(broker).reservations[found.id].phase == "Reserved"
