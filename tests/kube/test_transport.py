"""Whole agents that use cluster namespaces, and the faults that they survive together."""

import asyncio
import contextlib
from pathlib import Path

import pytest

import agent_process
import broker_process
import brokers
import make
from kube_stores import Place
from kubelend.core import audit
from kubelend.core.errors import BrokerUnreachable
from kubelend.core.models import ClusterId
from kubelend.stores.memory import MemoryStore
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction, ReservationInstruction, ResourceRequest
from tenants import BROKER, Tenants
from waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(180)]

GPUS = 'nodes: [{capacity: {cpu: 8, memory: 32Gi, "nvidia.com/gpu": 4}}]\n'
SMALL = "nodes: [{capacity: {cpu: 1, memory: 1Gi}}]\n"
REQUEST = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"), duration="1h")
LARGEST = 50 * 2**20
"""Bytes that an agent may take."""


def offer(cluster):
    return bodies.Advertisement(cluster, bodies.Metrics(bodies.Quantities("4", "8Gi")))


def has(phase):
    return lambda found: found.status.phase == phase


@pytest.fixture
async def broker(start):
    """By the clock of the wall: the agents have no other."""
    from kubelend.kits import clock

    return await start(clock=clock.utc_now)


@pytest.fixture
def cluster(clusters):
    """The broker's own, to be stopped and started."""
    [found] = clusters(1)
    return found


@contextlib.contextmanager
def agent(tenants, name, directory, nodes, *flags):
    namespace = tenants.create(name)
    with agent_process.running(
        "https://nowhere.invalid",
        Path("nowhere"),
        directory / name,
        "--broker-transport=kubernetes",
        f"--broker-kubeconfig={tenants.kubeconfig(namespace)}",
        f"--broker-namespace={namespace}",
        f"--cluster-id={name}",
        *flags,
        cluster=nodes,
    ) as running:
        yield running


def is_clean(broker):
    ledger, _ = broker.service.current()
    return audit.invariant_violations(ledger) == []


async def test_resource_requests_work_and_gpus_are_not_dropped(cluster, broker, tmp_path):
    tenants = Tenants(cluster)
    async with tenants.served_by(broker.service):
        with (
            agent(tenants, "bonn", tmp_path, GPUS) as bonn,
            agent(tenants, "rome", tmp_path, SMALL) as rome,
        ):
            for each in (bonn, rome):
                await asyncio.to_thread(each.wait_until_ready)
            rome.put("training", cpu="2", requestedGPU='"2"', duration="1h")
            found = await asyncio.to_thread(rome.sees, ResourceRequest, "training", has("Reserved"))
            reservation = found.status.reservation_name
            assert found.status.target_cluster_id == "bonn"
            name = f"{reservation}-provider"
            held = await asyncio.to_thread(bonn.sees, ProviderInstruction, name, has("Held"))
            assert (held.spec.requested_gpu, held.spec.requester_cluster_id) == ("2", "rome")
            await asyncio.to_thread(
                rome.sees, ReservationInstruction, reservation, has("NotPeered")
            )
            ledger, _ = broker.service.current()
            assert ledger.reserved(ClusterId("bonn")).gpu == 2
            assert ledger.cluster(ClusterId("bonn")).advertisement.capacity.gpu == 4
            for each in (bonn, rome):
                assert resident(each) < LARGEST
            await survive_a_restart(cluster, broker, rome, bonn)
            rome.remove("training")
            await asyncio.to_thread(rome.sees, ReservationInstruction, reservation, has("Finished"))
            assert is_clean(broker)
            for each in (bonn, rome):
                assert each.end() == 0
                assert [line for line in each.log() if line["level"] == "error"] == []


async def survive_a_restart(cluster, broker, rome, bonn):
    """Of the API server, with a request made while it is away."""
    cluster.kill()
    rome.put("meanwhile", wait="1m")  # for the provider falls silent, too
    await asyncio.to_thread(rome.wait_for, lambda: rome.get("/readyz")[0] == 503)
    cluster.start()
    await asyncio.to_thread(cluster.wait_until_ready)
    found = await asyncio.to_thread(rome.sees, ResourceRequest, "meanwhile", has("Reserved"))
    name = f"{found.status.reservation_name}-provider"
    await asyncio.to_thread(bonn.sees, ProviderInstruction, name, has("Held"))
    rome.remove("meanwhile")
    await asyncio.to_thread(bonn.sees, ProviderInstruction, name, has("Withdrawn"))
    assert is_clean(broker)


def resident(running):
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


async def test_stream_goes_on_behind_a_restart_of_the_api_server(cluster, broker):
    tenants = Tenants(cluster)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(tenants.served_by(broker.service))
        bonn = await tenants.open(tenants.create("bonn"))
        rome = await tenants.open(tenants.create("rome"))
        for each in (bonn, rome):
            stack.push_async_callback(each.close)
        await bonn.publish(offer("bonn"))
        first = await rome.request(REQUEST, "1")
        resets, told = [], []
        stream = bonn.stream(lambda: resets.append(1))
        assert (await anext(stream)).reservation == first
        await asyncio.to_thread(cluster.restart)
        with pytest.raises(BrokerUnreachable):
            await anext(stream)
        second = await patient(lambda: rome.request(REQUEST, "2"))

        async def listen():
            instruction = await anext(bonn.stream(lambda: resets.append(1)))
            told.append(instruction.reservation.id)
            return True

        await patient(listen)
        assert (resets, told) == ([1], [second.id])
        assert is_clean(broker)


async def patient(call):
    """The answer once the broker is there again."""
    answer = None

    async def attempt():
        nonlocal answer
        with contextlib.suppress(BrokerUnreachable):
            answer = await call()
        return answer is not None

    await until(attempt, 30)
    return answer


async def test_what_was_asked_while_no_broker_was_there_is_done_once(start, kube):
    """Also if the one before had done it, and could not say so any more."""
    tenants, store = Tenants(kube), MemoryStore()
    first = await start(open_store=lambda: store)
    rome, bonn = tenants.create("rome"), tenants.create("bonn")
    async with tenants.served_by(first.service):
        provider = await tenants.open(bonn)
        await provider.publish(offer("bonn"))
    requester = await tenants.open(rome)
    asking = asyncio.ensure_future(requester.request(REQUEST, "k"))
    await first.cluster("rome").post(
        "reservations",
        {"requestedResources": {"cpu": "1", "memory": "1Gi"}, "duration": "1h"},
        key="k",
    )
    async with tenants.served_by(first.service):
        found = await asking
        ledger, _ = first.service.current()
        assert list(ledger.reservations) == [found.id]
        assert [one.id for one in await provider.instructions()] == [found.id]
        await requester.close()
        await provider.close()
    tenants.close()


async def test_questions_and_state_live_side_by_side_in_one_cluster(start, kube):
    """The broker's own objects are in its namespace, what clusters ask is in theirs."""
    place = Place(kube)
    tenants = Tenants(kube, place.namespace)
    broker = await start(open_store=place.open)
    async with tenants.served_by(broker.service):
        rome, bonn = tenants.create("rome"), tenants.create("bonn")
        requester, provider = await tenants.open(rome), await tenants.open(bonn)
        await provider.publish(offer("bonn"))
        found = await requester.request(REQUEST, "k")
        await provider.acknowledge(found.id)
        await requester.activate(found.id)
        state = await asyncio.to_thread(
            kube.kubectl, "get", "reservations", "--output=name", f"--namespace={place.namespace}"
        )
        assert state.split() == [f"reservation.broker.fluidos.eu/{found.id}"]
        await requester.release(found.id)
        assert is_clean(broker)
        broker.clock.pass_time(2 * make.HOUR)
        await broker.expire()
        await requester.ping()
        await until(lambda: is_empty(kube, rome))
        await requester.close()
        await provider.close()
    tenants.close()


async def is_empty(kube, namespace):
    names = ("get", "reservations,pins", "--output=name", f"--namespace={namespace}")
    return await asyncio.to_thread(kube.kubectl, *names) == ""


def test_broker_process_serves_cluster_namespaces(cluster, certificates, tmp_path):
    """Its ledger in a file, REST beside it, and an agent with nothing but its namespace."""
    tenants = Tenants(cluster)
    flags = ("--cluster-namespaces", f"--kubeconfig={cluster.kubeconfig_for(BROKER)}")
    with (
        broker_process.running(certificates.server(), tmp_path, *flags) as broker,
        agent(tenants, "bonn", tmp_path, GPUS) as bonn,
        agent_process.running(
            broker.url, certificates.cluster("rome"), tmp_path / "rome", cluster=SMALL
        ) as rome,
    ):
        for each in (bonn, rome):
            each.wait_until_ready()
        rome.put("training", requestedGPU='"2"')
        found = rome.sees(ResourceRequest, "training", has("Reserved"))
        name = f"{found.status.reservation_name}-provider"
        held = bonn.sees(ProviderInstruction, name, has("Held"))
        assert held.spec.requested_gpu == "2"
        rome.remove("training")
        bonn.sees(ProviderInstruction, name, has("Withdrawn"))
    brokers.audited(broker.store)
