"""Cluster namespaces on a real API server: permissions of their accounts, and what the broker accepts."""

import asyncio
import contextlib
from typing import Any

import pytest

import make
from kube_stores import connecting
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.communicators import factory
from kubelend.communicators.cluster_namespace import (
    LEASE_DURATION,
    LEASE_NAME,
    AgentLease,
    NamespaceClient,
)
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.controllers.cluster_namespaces.handlers import Dependencies
from kubelend.controllers.cluster_namespaces.plan import NamespaceCache
from kubelend.controllers.cluster_namespaces.reconciler import NamespaceReconciler
from kubelend.core import audit
from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    IdentityInUse,
    NotFound,
    Unavailable,
    UnexpectedResponse,
)
from kubelend.core.models import ClusterId
from kubelend.kube import resources
from kubelend.kube.leader_election import LEASES
from kubelend.stores.kubernetes import objects
from kubelend.wire import bodies
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation, ReservationSpec
from kubelend.wire.objects import Metadata, ProviderInstruction
from tenants import TERMS
from waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(120)]

SOME = bodies.Quantities("1", "1Gi")
REQUEST = bodies.ReservationRequest(SOME, duration="1h")
RESERVATIONS = resources.resource_for(Reservation)


def offer(cluster, **amounts):
    capacity = bodies.Quantities("4", "8Gi", **amounts)
    return bodies.Advertisement(cluster, bodies.Metrics(capacity))


@pytest.fixture
async def served(tenants, broker):
    """A broker that serves the cluster namespaces; the audit is clean at the end."""
    async with tenants.served_by(broker.service):
        yield broker
        assert audit.invariant_violations(ledger(broker)) == []


@pytest.fixture
async def opened(tenants, served):
    async with contextlib.AsyncExitStack() as stack:
        yield lambda *arguments: stack.enter_async_context(tenants.agent(*arguments))


@pytest.fixture
async def lent(tenants, opened):
    """A provider with an instruction for a reservation, and its requester."""
    rome, bonn = tenants.create("rome"), tenants.create("bonn")
    provider, requester = await opened(bonn), await opened(rome)
    await provider.publish(offer("bonn"))
    return rome, bonn, requester, provider


def ledger(broker):
    found, _ = broker.service.current()
    return found


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


async def test_reservation_for_another_cluster_is_rejected(tenants, served, lent):
    rome, _, _, _ = lent
    claimed = Reservation(Metadata("mine", rome), ReservationSpec(SOME, requester_id="bonn"))
    async with tenants.account(rome) as client:
        await client.create(RESERVATIONS, claimed)
        found = await seen(client, RESERVATIONS, "mine", rome, lambda one: one.status.conditions)
    assert (found.status.phase, found.status.reason) == ("Failed", "Forbidden")
    assert found.status.message == (
        "requesterID 'bonn' is not the namespace's cluster 'rome'; write rome, whose namespace this is"
    )
    assert ledger(served).reservations == {}


async def test_name_of_another_clusters_reservation_gives_no_access(tenants, served, lent):
    """Whatever an account writes where it may: a name alone gives no access."""
    _, _, requester, _ = lent
    found = await requester.request(REQUEST, "k")
    paris = tenants.create("paris")
    forged = ReservationSpec(SOME, released=True, active_cluster_id="bonn")
    managed = {objects.MANAGED_BY: objects.MANAGED_BY_BROKER}
    for name, labels in (("a", {}), (found.id, managed)):
        made = Reservation(Metadata(name, paris, labels=labels), forged)
        async with tenants.account(paris) as client:
            await client.create(RESERVATIONS, made)
    async with tenants.agent(paris) as agent:
        assert found.id not in [one.id for one in await agent.instructions()]
        with pytest.raises(NotFound):
            await agent.release(found.id)
    assert (await requester.find(found.id)).status.phase == "Reserved"


async def test_revoked_cluster_is_rejected(tenants, served, lent):
    _, _, requester, _ = lent
    await revoke(served, "rome")
    with pytest.raises(Forbidden, match="cluster rome was revoked"):
        await requester.request(REQUEST, "k")
    with pytest.raises(Forbidden):
        await anext(requester.stream(lambda: None))


async def revoke(broker, cluster):
    admin = broker.admin()
    answer = await admin.post("members", "cluster", cluster, "revoke", {"reason": "test"})
    assert answer.status == 200, answer


# -- one agent speaks


async def test_second_agent_is_rejected_until_the_first_has_left(tenants, served, opened):
    namespace = tenants.create("bonn")
    first, second = await opened(namespace, "first"), await opened(namespace, "second")
    await first.publish(offer("bonn"))
    for call in (
        lambda: second.publish(offer("bonn")),
        lambda: second.request(REQUEST, "k"),
        lambda: anext(second.stream(lambda: None)),
    ):
        with pytest.raises(IdentityInUse, match=r"another agent is active in namespace .*first"):
            await call()
    await second.ping()
    assert await second.instructions() == []
    await first.close()
    await second.publish(offer("bonn"))


async def test_lease_is_renewed_by_changes_and_taken_over_when_it_has_expired(tenants, served):
    namespace, times = tenants.create("bonn"), Timers()
    async with tenants.account(namespace) as client:
        place = NamespaceClient(client, namespace)
        first, second = (
            AgentLease(place, name, clock=served.clock, timer=times) for name in ("one", "two")
        )

        async def held():
            found: Any = await place.find(LEASES, LEASE_NAME)
            return found.spec

        await first.hold()
        began = (await held()).renew_time
        with pytest.raises(IdentityInUse):
            await second.hold()
        times.now += LEASE_DURATION.total_seconds() / 2
        served.clock.pass_time(LEASE_DURATION / 2)
        await first.hold()
        assert (await held()).renew_time > began
        times.now += LEASE_DURATION.total_seconds() - 1
        for _ in range(2):
            with pytest.raises(IdentityInUse):  # it has changed since it was last observed
                await second.hold()
            times.now += LEASE_DURATION.total_seconds() - 1
        times.now += 1
        await second.hold()
        assert ((await held()).holder_identity, (await held()).lease_transitions) == ("two", 1)
        with pytest.raises(IdentityInUse):
            await first.hold()
        await second.release()
        await first.hold()
        served.clock.pass_time(11 * LEASE_DURATION)
        await second.hold()  # at once: nobody has renewed it for long


class Timers:
    now = 0.0

    def __call__(self):
        return self.now


async def test_agent_without_a_cluster_namespace_writes_nothing(kube, place, kube_client):
    """With the defaults of both sides its namespace is the broker's own, in which it has no identity."""
    options = CommunicatorOptions(
        kubeconfig=str(kube.admin_kubeconfig), namespace=place.namespace, timeout=5 * make.SECOND
    )
    agent: Any = await factory.open_communicator("kubernetes", options)
    for call in (
        lambda: agent.publish(offer("rome")),
        lambda: agent.request(REQUEST, "k"),
        lambda: anext(agent.stream(lambda: None)),
    ):
        with pytest.raises(BrokerUnreachable, match="is not a cluster namespace"):
            await call()
    await agent.close()
    for kind in (RESERVATIONS, resources.resource_for(ClusterAdvertisement)):
        assert (await kube_client.list(kind, place.namespace)).objects == []


# -- people, who have kubectl and no agent


async def test_user_applies_activates_and_deletes_a_reservation(
    tenants, served, lent, kube, kube_client, tmp_path
):
    rome, _, requester, provider = lent
    mine = tenants.kubeconfig(rome)
    file = tmp_path / "request.yaml"
    file.write_text(
        "apiVersion: broker.fluidos.eu/v1alpha1\nkind: Reservation\n"
        f"metadata: {{name: request, namespace: {rome}}}\n"
        "spec: {requestedResources: {cpu: 500m, memory: 256Mi}, duration: 1h}\n"
    )
    await asyncio.to_thread(kube.kubectl, "apply", f"--filename={file}", kubeconfig=mine)
    async with tenants.account(rome) as client:
        found = await seen(
            client, RESERVATIONS, "request", rome, lambda one: one.status.phase == "Reserved"
        )
        assert found.status.target_cluster_id == "bonn"
        [held] = await provider.instructions()
        assert (held.requester_id, held.requested_resources.cpu) == ("rome", "500m")
        assert await requester.instructions() == [held]
        condition = {"type": "RequesterActive", "status": "True"}
        change = {"status": {"conditions": [condition]}}
        await kube_client.patch(RESERVATIONS, "request", rome, change, subresource="status")
        await seen(client, RESERVATIONS, "request", rome, lambda one: one.status.phase == "Active")
        await client.delete(RESERVATIONS, "request", rome)
        await until(lambda: is_gone(client, "request", rome))
    assert await provider.instructions() == []
    [over] = ledger(served).reservations.values()
    assert (over.phase, over.reason) == ("Released", "Deleted")


async def is_gone(client, name, namespace):
    return await client.find(RESERVATIONS, name, namespace) is None


async def test_reservation_requested_elsewhere_is_shown_and_can_be_released(served, lent):
    _, _, requester, _ = lent
    made = await served.cluster("rome").post(
        "reservations", {"requestedResources": {"cpu": 1, "memory": "1Gi"}}
    )
    [found] = await requester.instructions()
    assert found.id == made.json["id"]
    assert (await requester.activate(found.id)).status.phase == "Active"
    assert (await requester.release(found.id)).status.phase == "Released"


# -- failures


async def repeated(call, *arguments):
    """As agents repeat a call after a retryable error: the write that fails may be that of the answer."""
    while True:
        with contextlib.suppress(Unavailable):
            return await call(*arguments)


async def test_every_write_may_fail_once_before_or_after_it_is_sent(tenants, broker):
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

    async with (
        tenants.served_by(broker.service, connect=connecting(flaky)),
        tenants.agent(tenants.create("rome")) as rome,
        tenants.agent(tenants.create("bonn")) as bonn,
    ):
        await repeated(bonn.publish, offer("bonn"))
        found = await repeated(rome.request, REQUEST, "k")
        await repeated(bonn.acknowledge, found.id)
        await repeated(rome.activate, found.id)
        renewed = await repeated(rome.renew, found.id, "2h")
        assert renewed.status.expires_at == make.T0 + 2 * make.HOUR
        assert (await repeated(rome.release, found.id)).status.phase == "Released"
        assert await repeated(bonn.instructions) == []
        assert list(ledger(broker).reservations) == [found.id]
        assert audit.invariant_violations(ledger(broker)) == []
        assert writes > 8


async def test_object_that_the_watch_has_not_shown_yet_is_no_conflict(tenants, broker, kube_client):
    """Made by an attempt whose response was lost: agents would get the conflict as the broker's error."""
    amounts = {"cpu": 1, "memory": "1Gi"}
    advertisement = {"clusterID": "bonn", "resources": {"capacity": amounts}}
    await broker.cluster("bonn").post("advertisements", advertisement)
    made = await broker.cluster("rome").post("reservations", {"requestedResources": amounts})
    sessions = AgentSessions(broker.service.clock, make.MINUTE)
    dependencies = Dependencies(kube_client, broker.service, TERMS, sessions)
    for cluster in map(ClusterId, ("rome", "bonn")):
        namespace = tenants.create(cluster)
        for _ in range(2):
            known = NamespaceCache()
            one = NamespaceReconciler(dependencies, namespace, cluster, known, lambda: None)
            await one.reconcile()
            assert known.shows(made.json["id"])


# -- quiet


async def test_unchanged_namespace_is_not_written(tenants, broker, kube):
    writes = []

    async def counted(write):
        writes.append(write.__qualname__)
        return await write

    async with (
        tenants.served_by(broker.service, connect=connecting(counted)),
        tenants.agent(tenants.create("rome")) as rome,
        tenants.agent(tenants.create("bonn")) as bonn,
    ):
        await bonn.publish(offer("bonn"))
        found = await rome.request(REQUEST, "k")
        await bonn.acknowledge(found.id)
        await rome.ping()
        await bonn.ping()
        before = len(writes)
        await broker.service.load()  # which has every object looked at again
        await rome.ping()
        await bonn.ping()
        assert len(writes) - before == 2


# -- roles


async def test_account_cannot_write_the_spec_of_its_instructions(tenants):
    namespace, kind = tenants.create("rome"), resources.resource_for(ProviderInstruction)
    async with tenants.account(namespace) as client:
        with pytest.raises(Forbidden):
            await client.patch(kind, "any", namespace, {"spec": {"message": "less"}})


def test_account_reads_and_writes_its_own_namespace_only(tenants, kube):
    rome, bonn = tenants.create("rome"), tenants.create("bonn")
    mine = tenants.kubeconfig(rome)
    kube.kubectl(
        "get", "reservations,clustersessions,cadv,pins", f"--namespace={rome}", kubeconfig=mine
    )
    for place in (f"--namespace={bonn}", "--namespace=default", "--all-namespaces"):
        for kind in ("reservations", "clustersessions", "cadv", "pins", "ledgerrecords", "secrets"):
            with pytest.raises(UnexpectedResponse, match="forbidden"):
                kube.kubectl("get", kind, place, kubeconfig=mine)


@pytest.mark.parametrize(
    "refused",
    [
        ("label", "namespace", "{}", "broker.fluidos.eu/cluster-id=bonn", "--overwrite"),
        ("delete", "namespace", "{}"),
        ("create", "token", "kubelend-agent", "--namespace={}"),
        ("delete", "clustersession", "session", "--namespace={}"),
        ("delete", "lease", "kubelend-agent", "--namespace={}"),
        ("get", "ledgerrecords", "--namespace={}"),
        ("get", "roles", "--namespace={}"),
        *(
            ("patch", kind, "any", "--namespace={}", "--subresource=status", "-p={{}}")
            for kind in ("reservation", "clusteradvertisement", "clustersession")
        ),
        ("delete", "providerinstruction", "any", "--namespace={}"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_account_cannot_write_fields_of_the_broker_or_the_operator(tenants, kube, refused):
    namespace = tenants.create("rome")
    words = [word.format(namespace) for word in refused]
    words += ["--type=merge"] if "patch" in words else []
    with pytest.raises(UnexpectedResponse, match="forbidden"):
        kube.kubectl(*words, kubeconfig=tenants.kubeconfig(namespace))
