"""Mailboxes on a real API server: who may do what in them, and whom the broker believes."""

import asyncio
import contextlib

import msgspec
import pytest

import make
from kube_stores import connecting
from kubelend.core import audit
from kubelend.core.errors import BrokerUnreachable, Forbidden, IdentityInUse, NotFound, Unavailable
from kubelend.core.models import ClusterId
from kubelend.kube import config, resources
from kubelend.kube.client import Client
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.broker_objects import ClusterSession, Reservation, ReservationSpec
from kubelend.wire.objects import AgentRequest, Metadata, ProviderInstruction
from waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(120)]

SOME = bodies.Quantities("1", "1Gi")
WISH = bodies.ReservationRequest(SOME, duration="1h")
RESERVATIONS = resources.resource_for(Reservation)
INSTRUCTIONS = resources.resource_for(ProviderInstruction)


def offer(cluster, **amounts):
    capacity = bodies.Quantities("4", "8Gi", **amounts)
    return bodies.Advertisement(cluster, bodies.Metrics(capacity))


@pytest.fixture
async def attended(office, broker):
    """The broker attends to the mailboxes; the audit is clean at the end."""
    async with office.attended(broker.service):
        yield broker
        assert audit.invariant_violations(ledger(broker)) == []


@pytest.fixture
async def talk(office, attended):
    async with contextlib.AsyncExitStack() as stack:

        async def talk(namespace, instance="one"):
            found = await office.open(namespace, instance)
            stack.push_async_callback(found.close)
            return found

        yield talk


@pytest.fixture
async def lent(office, talk):
    """A provider's mailbox that has been told of a reservation; and what was asked for in the other."""
    rome, bonn = office.create("rome"), office.create("bonn")
    provider, requester = await talk(bonn), await talk(rome)
    await provider.publish(offer("bonn"))
    return rome, bonn, requester, provider


def ledger(broker):
    found, _ = broker.service.current()
    return found


def by_account(office, namespace):
    return Client.open(config.config_from_kubeconfig(office.kubeconfig(namespace)))


async def seen(client, resource, name, namespace, wanted):
    """The object once it is as wanted."""
    found = None

    async def look():
        nonlocal found
        found = await client.find(resource, name, namespace)
        return found is not None and wanted(found)

    await until(look)
    return found


# -- whom the broker believes


async def test_account_cannot_write_what_it_is_told_to_hold(office, attended, lent):
    _, bonn, requester, _ = lent
    found = await requester.request(WISH, "k")
    name = cluster_namespaces.instruction_object_name(found.id)
    async with by_account(office, bonn) as client:
        assert await seen(client, INSTRUCTIONS, name, bonn, lambda _: True)
        with pytest.raises(Forbidden):
            await client.patch(INSTRUCTIONS, name, bonn, {"spec": {"message": "less"}})
        with pytest.raises(Forbidden):
            await client.delete(INSTRUCTIONS, name, bonn)


async def test_reservation_in_another_name_is_refused_and_holds_nothing(office, attended, lent):
    rome, _, _, _ = lent
    claimed = Reservation(Metadata("mine", rome), ReservationSpec(SOME, requester_id="bonn"))
    async with by_account(office, rome) as client:
        await client.create(RESERVATIONS, claimed)
        found = await seen(client, RESERVATIONS, "mine", rome, lambda one: one.status.response)
    assert (found.status.phase, found.status.reason) == ("Failed", "Forbidden")
    assert found.status.message == (
        "requesterID 'bonn' is not the namespace's cluster 'rome'; write rome, whose namespace this is"
    )
    assert ledger(attended).reservations == {}


async def test_advertisement_in_another_name_is_refused_and_not_believed(office, attended, lent):
    _, _, requester, _ = lent
    with pytest.raises(Forbidden, match="clusterID 'bonn' is not the namespace's cluster 'rome'"):
        await requester.publish(offer("bonn"))
    assert list(ledger(attended).clusters) == [ClusterId("bonn")]
    assert ledger(attended).cluster(ClusterId("bonn")).ceiling.cpu == 4000


async def test_question_about_another_clusters_reservation_finds_nothing(office, attended, lent):
    """Whatever an account writes where it may: the names in it open no door."""
    _, _, requester, _ = lent
    found = await requester.request(WISH, "k")
    paris = office.create("paris")
    forged = ReservationSpec(SOME, request=AgentRequest("q", "release"), target_cluster_id="bonn")
    async with by_account(office, paris) as client:
        await client.create(RESERVATIONS, Reservation(Metadata(found.id, paris), forged))
        told = await seen(client, RESERVATIONS, found.id, paris, lambda one: one.status.response)
    assert type(cluster_namespaces.error_from_response(told.status.response)) is NotFound
    assert (await requester.find(found.id)).status.phase == "Reserved"


async def test_unlabelled_namespace_is_nobodys_mailbox(office, attended, talk, namespace, kube):
    alone = ClusterSession(Metadata("session", namespace))
    async with Client.open(config.config_from_kubeconfig(kube.admin_kubeconfig)) as client:
        await client.create(resources.resource_for(ClusterSession), alone)
        wish = Reservation(Metadata("w", namespace), ReservationSpec(SOME))
        await client.create(RESERVATIONS, wish)
        rome = await talk(office.create("rome"))
        await rome.ping()
        unread = await client.find(RESERVATIONS, "w", namespace)
        assert unread is not None
        assert unread.status.response is None


async def test_revoked_cluster_is_refused(office, attended, lent):
    _, _, requester, _ = lent
    await revoke(attended, "rome")
    with pytest.raises(Forbidden, match="cluster rome was revoked"):
        await requester.request(WISH, "k")
    with pytest.raises(Forbidden):
        await anext(requester.stream(lambda: None))


async def revoke(broker, cluster):
    admin = broker.admin()
    answer = await admin.post("members", "cluster", cluster, "revoke", {"reason": "test"})
    assert answer.status == 200, answer


# -- one agent speaks


async def test_second_agent_is_refused_until_the_first_has_left(office, attended, talk):
    namespace = office.create("bonn")
    first, second = await talk(namespace, "first"), await talk(namespace, "second")
    await first.publish(offer("bonn"))
    for call in (
        lambda: second.publish(offer("bonn")),
        lambda: second.request(WISH, "k"),
        lambda: anext(second.stream(lambda: None)),
    ):
        with pytest.raises(IdentityInUse, match="another agent is active for bonn"):
            await call()
    await second.ping()
    assert await second.instructions() == []
    attended.clock.pass_time(2 * make.MINUTE)
    await second.publish(offer("bonn"))
    with pytest.raises(IdentityInUse):
        await first.publish(offer("bonn"))


async def test_place_is_free_soon_after_an_agent_that_listened_has_left(office, attended, talk):
    namespace = office.create("bonn")
    first, second = await talk(namespace, "first"), await talk(namespace, "second")
    stream = first.stream(lambda: None)
    with contextlib.suppress(TimeoutError, BrokerUnreachable):
        async with contextlib.aclosing(stream):
            listening = asyncio.ensure_future(anext(stream))
            await until(lambda: attended.service.streams.count(ClusterId("bonn")) == 1)
            await first.close()
            await listening
    await until(lambda: attended.service.streams.count(ClusterId("bonn")) == 0)
    attended.clock.pass_time(make.SECOND)
    await second.publish(offer("bonn"))


# -- people, who have kubectl and no agent


async def test_person_applies_uses_and_deletes_a_reservation(
    office, attended, lent, kube, tmp_path
):
    rome, _, requester, provider = lent
    mine = office.kubeconfig(rome)
    file = tmp_path / "wish.yaml"
    file.write_text(
        "apiVersion: broker.fluidos.eu/v1alpha1\nkind: Reservation\n"
        f"metadata: {{name: wish, namespace: {rome}}}\n"
        "spec: {requestedResources: {cpu: 500m, memory: 256Mi}, duration: 1h}\n"
    )
    await asyncio.to_thread(kube.kubectl, "apply", f"--filename={file}", kubeconfig=mine)
    async with by_account(office, rome) as client:
        found = await seen(
            client, RESERVATIONS, "wish", rome, lambda one: one.status.phase == "Reserved"
        )
        assert found.status.target_cluster_id == "bonn"
        [held] = await provider.instructions()
        assert (held.requester_id, held.requested_resources.cpu) == ("rome", "500m")
        assert await requester.instructions() == [held]
        condition = {"type": "RequesterActive", "status": "True"}
        async with Client.open(config.config_from_kubeconfig(kube.admin_kubeconfig)) as admin:
            change = {"status": {"conditions": [condition]}}
            await admin.patch(RESERVATIONS, "wish", rome, change, subresource="status")
        await seen(client, RESERVATIONS, "wish", rome, lambda one: one.status.phase == "Active")
        await client.delete(RESERVATIONS, "wish", rome)
        await until(lambda: is_gone(client, "wish", rome))
    assert await provider.instructions() == []
    [over] = ledger(attended).reservations.values()
    assert (over.phase, over.reason) == ("Released", "Deleted")


async def is_gone(client, name, namespace):
    return await client.find(RESERVATIONS, name, namespace) is None


async def test_what_was_asked_for_elsewhere_is_shown_and_can_be_given_back(attended, lent):
    _, _, requester, _ = lent
    made = await attended.cluster("rome").post(
        "reservations", {"requestedResources": {"cpu": 1, "memory": "1Gi"}}
    )
    [found] = await requester.instructions()
    assert found.id == made.json["id"]
    assert (await requester.activate(found.id)).status.phase == "Active"
    assert (await requester.release(found.id)).status.phase == "Released"


async def test_advertisement_is_carried_whole(attended, lent):
    _, _, _, provider = lent
    sent = bodies.Advertisement(
        "bonn",
        bodies.Metrics(
            bodies.Quantities("8", "16Gi", "4", "1Ti", {"example.com/fpga": "2"}),
            bodies.Quantities("7", "15Gi", "4", "1Ti", {"example.com/fpga": "2"}),
            bodies.Quantities("1", "1Gi", "1"),
        ),
        cluster_name="Bonn",
        timestamp=make.T0,
        cost=bodies.Cost("0.05", "0.01", "1.2", "0.001", "EUR"),
        labels={"tier": "gold"},
        region="eu",
        valid_for="5m0s",
        endpoint_url="https://bonn.example:6443",
        policy=bodies.LendingPolicy(deny=["guest"], keep_back={"cpu": "1"}),
    )
    answer = await provider.publish(sent)
    over_rest = await attended.cluster("bonn").get("advertisements", "bonn")
    kept = msgspec.json.decode(over_rest.content, type=bodies.Advertisement)
    for part in ("capacity", "allocatable", "allocated"):
        assert getattr(kept.resources, part) == getattr(sent.resources, part)
    for field in ("cost", "region", "valid_for", "endpoint_url", "policy", "cluster_name"):
        assert getattr(kept, field) == getattr(sent, field)
    assert kept.labels == {**sent.labels, "topology.kubernetes.io/region": "eu"}
    assert answer.advertisement.resources.available == bodies.Amounts(
        "6", "14Gi", "3", "1Ti", {"example.com/fpga": "2"}
    )
    less = await provider.publish(offer("bonn"))
    assert (less.advertisement.labels, less.advertisement.cost) == ({}, None)


# -- failures


async def test_every_write_may_fail_once_before_it_is_sent_or_after(office, broker):
    writes = 0

    async def flaky(write):
        nonlocal writes
        writes += 1
        if writes % 2:
            return await write
        if writes % 4:
            write.close()
        else:
            await write
        raise Unavailable("cut off")

    async with office.attended(broker.service, connect=connecting(flaky)):
        rome = await office.open(office.create("rome"))
        bonn = await office.open(office.create("bonn"))
        await bonn.publish(offer("bonn"))
        found = await rome.request(WISH, "k")
        await bonn.acknowledge(found.id)
        await rome.activate(found.id)
        assert (await rome.renew(found.id, "2h")).status.expires_at == make.T0 + 2 * make.HOUR
        assert (await rome.release(found.id)).status.phase == "Released"
        assert await bonn.instructions() == []
        assert list(ledger(broker).reservations) == [found.id]
        assert audit.invariant_violations(ledger(broker)) == []
        assert writes > 8
        await rome.close()
        await bonn.close()


# -- quiet


async def test_quiet_mailbox_is_not_written_to(office, broker, kube):
    writes = []

    async def counted(write):
        writes.append(write.__qualname__)
        return await write

    async with office.attended(broker.service, connect=connecting(counted)):
        rome = await office.open(office.create("rome"))
        bonn = await office.open(office.create("bonn"))
        await bonn.publish(offer("bonn"))
        found = await rome.request(WISH, "k")
        await bonn.acknowledge(found.id)
        await rome.ping()
        await bonn.ping()
        before = len(writes)
        await broker.service.load()  # which has every object looked at again
        await rome.ping()
        await bonn.ping()
        assert len(writes) - before == 2
        await rome.close()
        await bonn.close()
