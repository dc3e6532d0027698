"""Mailboxes of brokers as they are run: beside both interfaces, and while the broker that leads changes."""

import asyncio
import contextlib
import signal
from datetime import timedelta
from typing import Any

import pytest

import broker_process
import kube_broker
from kubelend.communicators import kubernetes_calls
from kubelend.core import audit
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.broker_objects import Reservation
from post_offices import PostOffice
from waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(180)]

FLAGS = (
    "--cluster-namespaces",
    "--leader-elect-lease-duration=3s",
    "--leader-elect-renew-deadline=2s",
    "--leader-elect-retry-period=500ms",
)
PATIENT = timedelta(seconds=60)
"""Of an agent, while one broker has gone and the other waits for the lease to end."""

WISH = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"), duration="1h")
SLOTS: tuple[Any, ...] = (
    kubernetes_calls.RESERVATION_SLOT,
    kubernetes_calls.INSTRUCTION_SLOT,
    kubernetes_calls.SESSION_SLOT,
)
CPUS = 8


@pytest.fixture
def office(kube, place):
    office = PostOffice(kube, place.namespace)
    yield office
    office.close()


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
async def rome(office):
    async with opened(office, "rome") as rome:
        yield rome


@pytest.fixture
async def bonn(office):
    async with opened(office, "bonn") as bonn:
        yield bonn


@contextlib.asynccontextmanager
async def opened(office, cluster):
    found = await office.open(office.create(cluster), timeout=PATIENT)
    try:
        yield found
    finally:
        await found.close()


def offer(cluster):
    return bodies.Advertisement(cluster, bodies.Metrics(bodies.Quantities(str(CPUS), "64Gi")))


def stored(place):
    with contextlib.closing(place.look()) as store:
        return Ledger.restore(store.load())


async def test_rest_objects_and_mailboxes_are_served_by_one_process(
    start_broker, bonn, certificates, kube, place
):
    broker = await asyncio.to_thread(start_broker, "first", "--broker-interface=http,kubernetes")
    await bonn.publish(offer("bonn"))
    async with BrokerClient(broker.url, certificates.cluster("rome")) as rome:
        by_rest = await rome.reserve(WISH, key="k")
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


async def open_questions(kube, office):
    """How many were asked in mailboxes and have no answer."""
    async with Client.open(config.config_from_kubeconfig(kube.admin_kubeconfig)) as client:
        listed = [
            (slot, found)
            for slot in SLOTS
            for name in office.names
            for found in (await client.list(slot.resource, name)).objects
        ]
    asked = [(slot, found) for slot, found in listed if slot.request(found) is not None]
    return sum(not slot.has_response(found) for slot, found in asked)


async def test_what_was_asked_of_a_leader_that_dies_is_answered_by_the_next(
    start_broker, office, rome, bonn, kube, place
):
    first, _ = [await asyncio.to_thread(start_broker, name) for name in ("first", "second")]
    await bonn.publish(offer("bonn"))
    known = await rome.request(WISH, "known")
    first.process.send_signal(signal.SIGSTOP)
    asked = [
        asyncio.create_task(one, name=f"question-{number}")
        for number, one in enumerate(
            (
                rome.request(WISH, "new"),
                rome.activate(known.id),
                bonn.acknowledge(known.id),
                rome.ping(),
            )
        )
    ]

    async def are_all_asked():
        return await open_questions(kube, office) == len(asked)

    try:
        await until(are_all_asked)
    finally:
        first.process.kill()
    new, *_ = await asyncio.gather(*asked)
    assert await open_questions(kube, office) == 0
    ledger = await asyncio.to_thread(stored, place)
    assert audit.invariant_violations(ledger) == []
    phases = {one.id: one.phase for one in ledger.reservations.values()}
    assert phases == {known.id: Phase.ACTIVE, new.id: Phase.RESERVED}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_leader_that_ends_in_the_middle_of_many_questions_promises_nothing_twice(
    start_broker, rome, bonn, place, end
):
    """Some are answered, some decided and not answered, and some neither."""
    first, _ = [await asyncio.to_thread(start_broker, name) for name in ("first", "second")]
    await bonn.publish(offer("bonn"))
    asked = [asyncio.create_task(rome.request(WISH, f"key-{number}")) for number in range(CPUS)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    first.process.send_signal(end)
    answered = {one.id for one in await asyncio.gather(*asked)}
    ledger = await asyncio.to_thread(stored, place)
    assert audit.invariant_violations(ledger) == []
    assert {one.id for one in ledger.reservations.values() if one.is_live} == answered
    assert len(answered) == CPUS
