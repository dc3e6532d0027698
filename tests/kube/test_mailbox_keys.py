"""Questions with the key of a reservation that another object stands for: they go, and it stays."""

import contextlib

import pytest

import make
from callers import wish
from kubelend.core.errors import IdentityInUse, KeyReused, StoreFailed
from kubelend.kube import config, resources
from kubelend.kube.client import Client
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation, ReservationSpec
from kubelend.wire.objects import AgentRequest, Metadata
from troubled import TroubledStore
from waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(120)]

KEY = "resourcerequest-1"
SOME, MORE = bodies.Quantities("1", "1Gi"), bodies.Quantities("2", "1Gi")
RESERVATIONS = resources.resource_for(Reservation)
RETENTION = make.HOUR


@pytest.fixture
def rome(office):
    return office.create("rome")


@pytest.fixture
async def account(office, rome):
    """What the cluster's account may do in its mailbox, by hand."""
    async with Client.open(config.config_from_kubeconfig(office.kubeconfig(rome))) as client:
        yield client


async def held(broker):
    """What rome has asked for over REST, and uses."""
    await broker.cluster("bonn").advertise()
    answer = await broker.cluster("rome").post("reservations", wish(duration="3h"), key=KEY)
    assert answer.status == 201
    return answer.json["id"]


async def phase(broker, reservation):
    return (await broker.cluster("rome").get("reservations", reservation)).json["status"]["phase"]


def question(name, namespace, amounts=SOME, **metadata):
    asked = AgentRequest(f"q-{name}", "reserve", agent="one")
    known = Metadata(
        name, namespace, annotations={cluster_namespaces.IDEMPOTENCY_ANNOTATION: KEY}, **metadata
    )
    return Reservation(known, ReservationSpec(amounts, duration="3h", request=asked))


async def is_gone(client, name, namespace):
    async def look():
        return await client.find(RESERVATIONS, name, namespace) is None

    await until(look)


async def refusal(client, name, namespace):
    async def look():
        found = await client.find(RESERVATIONS, name, namespace)
        return found is not None and found.status.response is not None

    await until(look)
    found = await client.find(RESERVATIONS, name, namespace)
    assert found.status.response.body == ""
    return found.status.reason


@contextlib.asynccontextmanager
async def opened(office, *arguments):
    agent = await office.open(*arguments)
    try:
        yield agent
    finally:
        await agent.close()


@pytest.mark.parametrize("by_hand", [False, True], ids=["by time", "by hand"])
async def test_refused_question_of_a_second_agent_leaves_the_first_ones_reservation(
    office, broker, rome, account, by_hand
):
    async with office.attended(broker.service), opened(office, rome) as first:
        reservation = await held(broker)
        await first.publish(bodies.Advertisement("rome", bodies.Metrics(SOME)))
        assert [one.id for one in await first.instructions()] == [reservation]
        async with opened(office, rome, "second") as second:
            with pytest.raises(IdentityInUse):
                await second.request(bodies.ReservationRequest(SOME, duration="3h"), KEY)
        name = cluster_namespaces.request_object_name(KEY)
        assert await refusal(account, name, rome) == "IdentityInUse"
        if by_hand:
            await account.delete(RESERVATIONS, name, rome)
        broker.clock.pass_time(RETENTION)
        await is_gone(account, name, rome)
        assert await phase(broker, reservation) == "Reserved"


@pytest.mark.parametrize("by_hand", [False, True], ids=["by time", "by hand"])
async def test_copy_of_a_question_that_asks_for_more_leaves_the_first_ones_reservation(
    office, broker, rome, account, by_hand
):
    await broker.cluster("bonn").advertise()
    async with office.attended(broker.service), opened(office, rome) as agent:
        found = await agent.request(bodies.ReservationRequest(SOME, duration="3h"), KEY)
        await account.create(RESERVATIONS, question("copy", rome, MORE))
        assert await refusal(account, "copy", rome) == "KeyReused"
        if by_hand:
            await account.delete(RESERVATIONS, "copy", rome)
        broker.clock.pass_time(RETENTION)
        await is_gone(account, "copy", rome)
        assert await phase(broker, found.id) == "Reserved"
        assert [one.id for one in await agent.instructions()] == [found.id]


async def test_agent_that_takes_its_refused_question_away_leaves_the_reservation(
    office, broker, rome, account
):
    async with office.attended(broker.service), opened(office, rome) as agent:
        reservation = await held(broker)
        assert [one.id for one in await agent.instructions()] == [reservation]
        with pytest.raises(KeyReused):
            await agent.request(bodies.ReservationRequest(MORE, duration="3h"), KEY)
        await is_gone(account, cluster_namespaces.request_object_name(KEY), rome)
        assert await phase(broker, reservation) == "Reserved"


async def test_deleted_question_gives_back_what_was_decided_and_never_answered(
    office, broker, rome, account
):
    """The broker ended in between; the next one finds the object with its finalizer, and deleted."""
    reservation = await held(broker)
    await account.create(RESERVATIONS, question("asked", rome, finalizers=(RESERVATION_FINALIZER,)))
    await account.delete(RESERVATIONS, "asked", rome)
    async with office.attended(broker.service):
        await is_gone(account, "asked", rome)
        assert await phase(broker, reservation) == "Released"


async def test_deleted_question_leaves_what_another_unanswered_one_has_asked_for(
    office, broker, rome, account
):
    reservation = await held(broker)
    for name in ("asked", "copy"):
        held_on = question(name, rome, finalizers=(RESERVATION_FINALIZER,))
        await account.create(RESERVATIONS, held_on)
    await account.delete(RESERVATIONS, "copy", rome)
    async with office.attended(broker.service):
        await is_gone(account, "copy", rome)
        assert await phase(broker, reservation) == "Reserved"


class OutdatedStore(TroubledStore):
    """Another broker may have written to it; nothing has met that yet."""

    is_outdated = False

    def check_fencing(self):
        if self.is_outdated:
            raise StoreFailed("another broker has written")


async def test_deleted_question_stays_while_another_broker_may_know_what_it_stands_for(
    office, start, rome, account
):
    store = OutdatedStore()
    broker = await start(open_store=lambda: store)
    await broker.cluster("bonn").advertise()
    async with office.attended(broker.service), opened(office, rome) as agent:
        await agent.request(bodies.ReservationRequest(SOME, duration="3h"), KEY)
        for name in ("deleted", "later"):
            await account.create(RESERVATIONS, question(name, rome, MORE))
            assert await refusal(account, name, rome) == "KeyReused"
            if name == "deleted":
                store.is_outdated = True
                await account.delete(RESERVATIONS, name, rome)
        assert await account.find(RESERVATIONS, "deleted", rome) is not None
        store.is_outdated = False
        await is_gone(account, "deleted", rome)
