"""Whole agents that use cluster namespaces, and the faults that they survive together."""

import asyncio
import contextlib
from pathlib import Path

import pytest

import agent_process
from kubelend.core import audit
from kubelend.core.models import ClusterId
from kubelend.wire.objects import ProviderInstruction, ReservationInstruction, ResourceRequest
from tenants import Tenants

pytestmark = [pytest.mark.kube, pytest.mark.timeout(180)]

GPUS = 'nodes: [{capacity: {cpu: 8, memory: 32Gi, "nvidia.com/gpu": 4}}]\n'
SMALL = "nodes: [{capacity: {cpu: 1, memory: 1Gi}}]\n"
LARGEST = 50 * 2**20
"""Bytes that an agent may take."""


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
