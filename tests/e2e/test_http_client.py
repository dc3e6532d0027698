"""The client and the real broker understand each other on every route."""

import contextlib
from datetime import timedelta

import pytest

import kubelend
from certificates import Certificates
from kubelend.core.errors import Forbidden, KeyReused, NoCapacity, NotFound, WrongPhase
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies

AMOUNTS = bodies.Quantities("2", "2Gi")
REQUEST = bodies.ReservationRequest(AMOUNTS, duration="1h")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture
async def connect(broker, certificates):
    """Opens clients; all are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def connect(directory):
            client = BrokerClient(f"https://localhost:{broker.port}", directory)
            return await stack.enter_async_context(client)

        yield connect


@pytest.fixture
async def borrower(connect, certificates):
    return await connect(certificates.cluster("borrower"))


@pytest.fixture
async def lender(connect, certificates):
    client = await connect(certificates.cluster("lender"))
    await client.publish(offer("lender"))
    return client


@pytest.fixture
async def admin(connect, certificates):
    return await connect(certificates.admin("alice"))


def offer(name):
    return bodies.Advertisement(name, bodies.Metrics(bodies.Quantities("4", "4Gi")))


async def test_a_reservation_lives_on_both_sides(borrower, lender):
    found = await borrower.reserve(REQUEST, key="k")
    assert (found.target_cluster_id, found.status.phase) == ("lender", "Reserved")
    assert await borrower.reserve(REQUEST, key="k") == found
    assert [held.id for held in await lender.instructions()] == [found.id]
    assert (await lender.acknowledge(found.id)).status.acknowledged_at is not None
    assert (await borrower.activate(found.id)).status.phase == "Active"
    renewed = await borrower.renew(found.id, "3h")
    assert renewed.status.expires_at - found.status.expires_at == timedelta(hours=2)
    assert (await borrower.release(found.id)).status.phase == "Released"
    assert (await lender.get_advertisement("lender")).resources.available.cpu == "4"
    assert [past.id for past in await lender.all_reservations(role="provider")] == [found.id]


async def test_errors_keep_their_class_on_the_way(borrower, lender, admin):
    too_much = bodies.ReservationRequest(bodies.Quantities("5", "1Gi"))
    with pytest.raises(NoCapacity, match="0/1 cluster fits: 1 InsufficientCPU"):
        await borrower.reserve(too_much)
    with pytest.raises(NotFound):
        await borrower.get_reservation("a/b ../%")
    with pytest.raises(Forbidden):
        await borrower.list_clusters()
    found = await borrower.reserve(REQUEST, key="k")
    with pytest.raises(KeyReused):
        await borrower.reserve(bodies.ReservationRequest(AMOUNTS, priority=1), key="k")
    await borrower.release(found.id)
    with pytest.raises(WrongPhase):
        await borrower.activate(found.id)


async def test_a_refusal_of_the_provider_reaches_the_requester(borrower, lender):
    found = await borrower.reserve(REQUEST)
    assert (await lender.refuse(found.id, "busy")).status.phase == "Failed"
    assert "busy" in (await borrower.get_reservation(found.id)).status.message


async def test_the_stream_tells_both_sides_and_resumes(borrower, lender):
    async with contextlib.aclosing(lender.stream()) as stream:
        found = await borrower.reserve(REQUEST)
        hold = await anext(stream)
    assert (hold.action, hold.reservation.id) == ("Hold", found.id)
    await borrower.release(found.id)
    async with contextlib.aclosing(lender.stream(after=str(hold.revision))) as stream:
        assert (await anext(stream)).action == "Withdraw"


async def test_the_requester_is_told_what_to_use(borrower, lender):
    found = await borrower.reserve(REQUEST)
    resets = []
    stream = borrower.stream(on_reset=lambda: resets.append(1))
    async with contextlib.aclosing(stream):
        use = await anext(stream)
    assert (use.role, use.action, use.reservation.id) == ("requester", "Use", found.id)
    assert resets == [1]


async def test_an_administrator_steers_clusters(borrower, lender, admin, connect, certificates):
    other = await connect(certificates.cluster("other"))
    await other.publish(offer("other"))
    found = await borrower.reserve(REQUEST)
    assert (await admin.cordon("other", "why")).status.cordon_reason == "why"
    assert not (await admin.uncordon("other")).status.cordoned
    drained = await admin.drain(found.target_cluster_id)
    assert [moved.target_cluster_id for moved in drained.reservations] == ["other"]
    await admin.remove_cluster("lender")
    assert [one.advertisement.cluster_id for one in await admin.all_clusters()] == ["other"]
    assert (await admin.get_cluster("other")).status.reservations == 1


async def test_pages_are_followed(borrower, lender):
    small = bodies.ReservationRequest(bodies.Quantities("10m", "1Mi"))
    made = [(await borrower.reserve(small)).id for _ in range(5)]
    first = await borrower.list_reservations(limit=2)
    second = await borrower.list_reservations(limit=2, after=first.next)
    assert [one.id for one in (*first.reservations, *second.reservations)] == made[:4]
    assert [one.id for one in await borrower.all_reservations()] == made


async def test_a_request_is_explained_and_planned_without_a_change(borrower, lender, admin):
    assert (await borrower.reserve_dry_run(REQUEST)).fitting == 1
    explained = await borrower.explain(REQUEST, limit=1)
    assert [one.cluster_id for one in explained.candidates] == ["lender"]
    assert await admin.all_reservations() == []
    found = await borrower.reserve(REQUEST)
    assert (await borrower.explain_reservation(found.id)).total == 1


async def test_the_broker_tells_of_itself(borrower):
    assert (await borrower.version()).version == kubelend.__version__
    assert (await borrower.openapi())["openapi"] == "3.1.0"
    assert await borrower.healthz() == "ok"
    assert await borrower.readyz() == "ok"
