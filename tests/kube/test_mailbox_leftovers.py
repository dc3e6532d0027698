"""What killed agents leave in their mailboxes, and a broker that cannot see mailboxes at all."""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request

import pytest

import broker_process
import make
from kube_stores import connecting
from kubelend.controllers.cluster_namespaces import reconciler
from kubelend.core.models import ClusterId
from kubelend.kube import config, resources
from kubelend.kube.client import Client
from kubelend.wire import bodies
from kubelend.wire.broker_objects import ClusterSession, Reservation, ReservationSpec
from kubelend.wire.objects import AgentRequest, Metadata
from post_offices import BROKER
from waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(120)]

SOME = bodies.Quantities("1", "1Gi")
RESERVATIONS, MAILBOXES = (
    resources.resource_for(Reservation),
    resources.resource_for(ClusterSession),
)
RETENTION = make.HOUR
SILENCE = 15 * make.MINUTE


@pytest.fixture
async def account(office):
    """What a cluster's account may do in its mailbox, by hand."""
    async with contextlib.AsyncExitStack() as stack:

        async def account(namespace):
            found = config.config_from_kubeconfig(office.kubeconfig(namespace))
            return await stack.enter_async_context(Client.open(found))

        yield account


# -- questions of agents that are gone


def question(name, namespace, agent="", **spec):
    asked = AgentRequest(f"q-{name}", "reserve", agent=agent) if agent else None
    return Reservation(Metadata(name, namespace), ReservationSpec(SOME, request=asked, **spec))


async def refused(client, name, namespace):
    async def look():
        found = await client.find(RESERVATIONS, name, namespace)
        return found is not None and found.status.response is not None

    await until(look)


async def are_gone(client, namespace, *names):
    async def look():
        found = await client.list(RESERVATIONS, namespace)
        return not {one.metadata.name for one in found.objects} & set(names)

    await until(look)


async def test_refused_questions_go_after_the_retention(office, broker, account):
    """Of an agent that would have taken its own away, and of a person."""
    rome = office.create("rome")
    client = await account(rome)
    async with office.attended(broker.service):
        await client.create(RESERVATIONS, question("agents", rome, "killed"))
        await client.create(RESERVATIONS, question("persons", rome))
        await refused(client, "agents", rome)
        await refused(client, "persons", rome)
        broker.clock.pass_time(RETENTION / 2)
        await client.create(RESERVATIONS, question("late", rome))
        await client.create(RESERVATIONS, question("waiting", rome, wait="1h"))
        await refused(client, "late", rome)
        await refused(client, "waiting", rome)
        broker.clock.pass_time(RETENTION / 2)
        await are_gone(client, rome, "agents", "persons")
        left = (await client.list(RESERVATIONS, rome)).objects
        assert sorted(one.metadata.name for one in left) == ["late", "waiting"]


async def test_question_that_might_have_been_asked_again_goes_too(office, broker, account):
    rome = office.create("rome")
    client = await account(rome)
    async with office.attended(broker.service):
        speaks = await office.open(rome, "speaks")
        await broker.cluster("bonn").advertise()
        await speaks.request(bodies.ReservationRequest(SOME, duration="3h"), "k")
        await client.create(RESERVATIONS, question("second", rome, "not-heard"))
        await refused(client, "second", rome)
        found = await client.find(RESERVATIONS, "second", rome)
        assert (found.status.phase, found.status.reason) == ("", "IdentityInUse")
        broker.clock.pass_time(RETENTION)
        await are_gone(client, rome, "second")
        assert len(await speaks.instructions()) == 1
        await speaks.close()


async def test_refused_question_goes_after_a_restart_and_nothing_else_is_written(
    office, broker, account
):
    rome = office.create("rome")
    client = await account(rome)
    async with office.attended(broker.service):
        await client.create(RESERVATIONS, question("persons", rome))
        await refused(client, "persons", rome)
    broker.clock.pass_time(RETENTION)
    writes = []

    async def counted(write):
        writes.append(write.__qualname__)
        return await write

    async with office.attended(broker.service, connect=connecting(counted)):
        await are_gone(client, rome, "persons")
        agent = await office.open(rome)
        before = len(writes)
        await agent.ping()
        await agent.ping()
        assert len(writes) - before == 2
        await agent.close()


# -- sessions of agents that are gone


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


async def test_session_of_a_killed_agent_ends_after_a_while(office, broker, account, monkeypatch):
    monkeypatch.setattr(reconciler, "SESSION_CHECK_SECONDS", 0.05)
    rome, feeds = office.create("rome"), broker.service.streams
    client = await account(rome)

    async def session():
        return (await client.find(MAILBOXES, "session", rome)).status.session

    async def is_begun():
        return (await session()).startswith("killed/")

    async with office.attended(broker.service):
        async with listening(await office.open(rome, "killed")):
            await until(is_begun)
            assert feeds.count(ClusterId("rome")) == 1
        broker.clock.pass_time(SILENCE - make.SECOND)
        other = await office.open(rome, "other")
        await other.ping()  # which is no sign of life of the first
        assert await is_begun()
        broker.clock.pass_time(make.SECOND)
        await until(lambda: feeds.count(ClusterId("rome")) == 0)

        async def is_over():
            return await session() == ""

        await until(is_over)
        await other.close()


async def test_session_of_an_agent_that_says_something_goes_on(office, broker, monkeypatch):
    monkeypatch.setattr(reconciler, "SESSION_CHECK_SECONDS", 0.05)
    rome, feeds = office.create("rome"), broker.service.streams
    async with office.attended(broker.service):
        agent = await office.open(rome)
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


# -- a broker that cannot see mailboxes


def readiness(directory):
    lines = (directory / "broker.log").read_text().splitlines()
    said = [json.loads(line) for line in lines if line.endswith("}")]
    port = next(line["port"] for line in said if line.get("component") == "probes")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_broker_that_cannot_see_mailboxes_says_so_until_it_can(
    kube, certificates, tmp_path, office
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
