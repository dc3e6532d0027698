"""Cluster namespaces over time: expired requests and sessions, unready brokers, and changes of the leader."""

import asyncio
import contextlib
import json
import signal
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

import pytest

import broker_process
import kube_broker
import make
from kube_stores import connecting
from kubelend.communicators import cluster_namespace
from kubelend.controllers.cluster_namespaces import handlers, plan
from kubelend.core import audit
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId
from kubelend.kube import resources
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.broker_objects import ClusterSession, Reservation, ReservationSpec
from kubelend.wire.objects import Metadata
from tenants import BROKER, Tenants
from waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(180)]

SOME = bodies.Quantities("1", "1Gi")
RESERVATIONS, SESSIONS = (
    resources.resource_for(Reservation),
    resources.resource_for(ClusterSession),
)
RETENTION = make.HOUR
SILENCE = 15 * make.MINUTE


@pytest.fixture
async def account(tenants):
    """What a cluster's account may do in its namespace."""
    async with contextlib.AsyncExitStack() as stack:
        yield lambda namespace: stack.enter_async_context(tenants.account(namespace))


# -- requests of agents that no longer run


def request_object(name, namespace, key="", **spec):
    annotations = {cluster_namespaces.IDEMPOTENCY_ANNOTATION: key} if key else {}
    known = Metadata(name, namespace, annotations=annotations)
    return Reservation(known, ReservationSpec(SOME, **spec))


async def create_rejected(client, obj):
    await client.create(RESERVATIONS, obj)

    async def is_answered():
        found = await client.find(RESERVATIONS, obj.metadata.name, obj.metadata.namespace)
        return found is not None and bool(found.status.conditions)

    await until(is_answered)


async def are_deleted(client, namespace, *names):
    async def look():
        found = await client.list(RESERVATIONS, namespace)
        return not {one.metadata.name for one in found.objects} & set(names)

    await until(look)


async def test_rejected_requests_are_deleted_after_the_retention(tenants, broker, account):
    """Of an agent that would have taken its own away, and of a person."""
    rome = tenants.create("rome")
    client = await account(rome)
    async with tenants.served_by(broker.service):
        await create_rejected(client, request_object("agents", rome, "killed"))
        await create_rejected(client, request_object("persons", rome))
        broker.clock.pass_time(RETENTION / 2)
        await create_rejected(client, request_object("late", rome))
        await create_rejected(client, request_object("waiting", rome, wait="1h"))
        broker.clock.pass_time(RETENTION / 2)
        await are_deleted(client, rome, "agents", "persons")
        left = (await client.list(RESERVATIONS, rome)).objects
        assert sorted(one.metadata.name for one in left) == ["late", "waiting"]


async def test_rejected_request_is_deleted_after_a_restart_and_nothing_else_is_written(
    tenants, broker, account
):
    rome = tenants.create("rome")
    client = await account(rome)
    async with tenants.served_by(broker.service):
        await create_rejected(client, request_object("persons", rome))
    broker.clock.pass_time(RETENTION)
    writes = []

    async def counted(write):
        writes.append(write.__qualname__)
        return await write

    async with tenants.served_by(broker.service, connect=connecting(counted)):
        await are_deleted(client, rome, "persons")
        agent = await tenants.open(rome)
        await agent.ping()  # whatever the deletion has caused is written before the answer
        before = len(writes)
        await agent.ping()
        await agent.ping()
        assert len(writes) - before == 2
        await agent.close()


# -- watches of agents that are gone


@contextlib.asynccontextmanager
async def listening(agent):
    """Until the agent is killed: it says nothing any more."""

    async def listen():
        async with contextlib.aclosing(agent.stream(lambda: None)) as stream:
            await anext(stream)

    task = asyncio.create_task(listen())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_watch_of_a_killed_agent_expires(tenants, broker, account, monkeypatch):
    monkeypatch.setattr(handlers, "SESSION_CHECK_SECONDS", 0.05)
    rome, feeds = tenants.create("rome"), broker.service.streams
    client = await account(rome)

    async def watch():
        return (await client.find(SESSIONS, "session", rome)).status.watch

    async def is_served():
        return await watch() != ""

    async def is_over():
        return not await is_served()

    async with tenants.served_by(broker.service):
        async with listening(await tenants.open(rome, "killed")):
            await until(is_served)
            assert feeds.count(ClusterId("rome")) == 1
        broker.clock.pass_time(SILENCE - make.SECOND)
        await asyncio.sleep(0.2)  # several checks
        assert await is_served()
        broker.clock.pass_time(make.SECOND)
        await until(lambda: feeds.count(ClusterId("rome")) == 0)
        await until(is_over)
        other = await tenants.open(rome, "other")
        await other.ping()
        assert not await is_served(), "the agent has to begin again"
        await other.close()


async def test_watch_of_an_agent_that_writes_does_not_expire(tenants, broker, monkeypatch):
    monkeypatch.setattr(handlers, "SESSION_CHECK_SECONDS", 0.05)
    rome, feeds = tenants.create("rome"), broker.service.streams
    async with tenants.served_by(broker.service):
        agent = await tenants.open(rome)
        async with listening(agent) as task:
            await until(lambda: feeds.count(ClusterId("rome")) == 1)
            for _ in range(3):
                broker.clock.pass_time(SILENCE * 2 / 3)
                capacity = bodies.Quantities("4", "8Gi")
                await agent.publish(bodies.Advertisement("rome", bodies.Metrics(capacity)))
            broker.clock.pass_time(SILENCE / 3)
            await agent.ping()
            assert not task.done()
            assert feeds.count(ClusterId("rome")) == 1
        await agent.close()


# -- a broker that cannot watch cluster namespaces


def readiness(directory):
    lines = (directory / "broker.log").read_text().splitlines()
    said = [json.loads(line) for line in lines if line.endswith("}")]
    port = next(line["port"] for line in said if line.get("component") == "probes")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_broker_that_cannot_watch_cluster_namespaces_is_unready(
    kube, certificates, tmp_path, tenants
):
    kubeconfig = kube.kubeconfig_for("hard-of-seeing")
    flags = ("--cluster-namespaces", f"--kubeconfig={kubeconfig}")
    probes = "--health-probe-bind-address=127.0.0.1:0"
    with broker_process.running(certificates.server(), tmp_path, *flags, probes):

        async def says_why():
            status, words = await asyncio.to_thread(readiness, tmp_path)
            why = "not ready: cannot watch namespaces in cluster namespaces: namespaces is forb"
            # Until it has looked, it can only say that it is about to.
            return status == 503 and words.startswith(why) and "initial list" not in words

        await until(says_why, 20)
        user, role = "--user=hard-of-seeing", f"--clusterrole={BROKER}"
        kube.kubectl("create", "clusterrolebinding", "hard-of-seeing", role, user)

        async def sees():
            return await asyncio.to_thread(readiness, tmp_path) == (200, "ok")

        await until(sees, 20)


# -- leaders

FLAGS = (
    "--cluster-namespaces",
    "--leader-elect-lease-duration=3s",
    "--leader-elect-renew-deadline=2s",
    "--leader-elect-retry-period=500ms",
)
PATIENT = timedelta(seconds=60)
"""Of an agent, while one broker has gone and the other waits for the lease to end."""

REQUEST = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"), duration="1h")
KINDS: tuple[Any, ...] = (
    cluster_namespace.RESERVATIONS,
    cluster_namespace.INSTRUCTIONS,
    cluster_namespace.SESSIONS,
)
CPUS = 8


@pytest.fixture
def leader_tenants(kube, place):
    leader_tenants = Tenants(kube, place.namespace)
    yield leader_tenants
    leader_tenants.close()


@pytest.fixture
def start_broker(certificates, tmp_path, place):
    with contextlib.ExitStack() as stack:

        def start_broker(name, *flags):
            directory = tmp_path / name
            directory.mkdir()
            store = f"--store={place.url}"
            identity = f"--leader-elect-identity={name}"
            running = broker_process.running(
                certificates.server(), directory, store, identity, *FLAGS, *flags
            )
            return stack.enter_context(running)

        yield start_broker


@pytest.fixture
async def rome(leader_tenants):
    namespace = leader_tenants.create("rome")
    async with leader_tenants.agent(namespace, timeout=PATIENT) as rome:
        yield rome


@pytest.fixture
async def bonn(leader_tenants):
    namespace = leader_tenants.create("bonn")
    async with leader_tenants.agent(namespace, timeout=PATIENT) as bonn:
        yield bonn


def offer(cluster):
    return bodies.Advertisement(cluster, bodies.Metrics(bodies.Quantities(str(CPUS), "64Gi")))


def stored(place):
    with contextlib.closing(place.open_readonly()) as store:
        return Ledger.restore(store.load())


async def test_rest_objects_and_cluster_namespaces_are_served_by_one_process(
    start_broker, bonn, certificates, kube, place
):
    broker = await asyncio.to_thread(start_broker, "first", "--broker-interface=http,kubernetes")
    await bonn.publish(offer("bonn"))
    async with BrokerClient(broker.url, certificates.cluster("rome")) as rome:
        by_rest = await rome.reserve(REQUEST, key="k")
        async with kube_broker.opened(kube, place.namespace) as objects:
            await objects.reserve("by-hand")
            shown = await objects.reserved("by-hand")
            assert shown.status.record is not None
            assert [one.id for one in await bonn.instructions()] == [by_rest.id, "by-hand"]
            for each in (by_rest.id, "by-hand"):
                await bonn.acknowledge(each)
            await objects.delete(Reservation, "by-hand")
            await objects.gone(Reservation, "by-hand")
        assert [one.id for one in await bonn.instructions()] == [by_rest.id]
        await rome.release(by_rest.id)
        assert await bonn.instructions() == []
    ledger = await asyncio.to_thread(stored, place)
    assert audit.invariant_violations(ledger) == []


async def pending_requests(client, leader_tenants):
    """Their number in all cluster namespaces."""
    listed = [
        found
        for kind in KINDS
        for name in leader_tenants.names
        for found in (await client.list(kind, name)).objects
    ]
    return sum(map(plan.is_pending, listed))


async def test_pending_requests_are_answered_by_the_next_leader(
    start_broker, leader_tenants, rome, bonn, kube_client, place
):
    first, _ = [await asyncio.to_thread(start_broker, name) for name in ("first", "second")]
    await bonn.publish(offer("bonn"))
    known = await rome.request(REQUEST, "known")
    first.process.send_signal(signal.SIGSTOP)
    asking = rome.request(REQUEST, "new"), rome.activate(known.id)
    calls = (*asking, bonn.acknowledge(known.id), rome.ping())
    asked = [asyncio.create_task(call) for call in calls]

    async def are_all_asked():
        return await pending_requests(kube_client, leader_tenants) == len(asked)

    try:
        await until(are_all_asked)
    finally:
        first.process.kill()
    new, *_ = await asyncio.gather(*asked)
    assert await pending_requests(kube_client, leader_tenants) == 0
    ledger = await asyncio.to_thread(stored, place)
    assert audit.invariant_violations(ledger) == []
    phases = {one.id: one.phase for one in ledger.reservations.values()}
    assert phases == {known.id: Phase.ACTIVE, new.id: Phase.RESERVED}


async def test_killed_leader_during_many_requests_reserves_nothing_twice(
    start_broker, rome, bonn, place
):
    """Some are answered, some decided and not answered, and some neither."""
    first, _ = [await asyncio.to_thread(start_broker, name) for name in ("first", "second")]
    await bonn.publish(offer("bonn"))
    asked = [asyncio.create_task(rome.request(REQUEST, f"key-{number}")) for number in range(CPUS)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    first.process.kill()
    answered = {one.id for one in await asyncio.gather(*asked)}
    ledger = await asyncio.to_thread(stored, place)
    assert audit.invariant_violations(ledger) == []
    assert {one.id for one in ledger.reservations.values() if one.is_live} == answered
    assert len(answered) == CPUS
