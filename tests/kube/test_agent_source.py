"""What an agent sees of a real cluster: the sums of its nodes and pods, whatever the API server does."""

import asyncio
import contextlib
import secrets

import pytest
from structlog.testing import capture_logs

import kube_objects
import kube_roles
from kube_objects import READY, Machines
from kubelend.agent.health import ComponentHealth
from kubelend.agent.ports import PodDeleted, Snapshot
from kubelend.agent.publisher import Collector
from kubelend.core.errors import Forbidden
from kubelend.core.inventory import Inventory
from kubelend.core.pod_requests import Pod
from kubelend.core.resources import Resources
from kubelend.sources.kubernetes import KubernetesSource
from waiting import until

pytestmark = pytest.mark.timeout(120)

GI = 1 << 30


@pytest.fixture
async def machines(kube_client):
    machines = Machines(kube_client)
    await machines.clear()
    yield machines
    await machines.clear()


class Watching:
    """A collector of a source, and its inventory."""

    def __init__(self, source):
        self.source = source
        self.inventory, self.health = Inventory(), ComponentHealth()
        self.collector = Collector(self.source, self.inventory, self.health, lambda: None)

    async def until(self, look):
        """Wait for the sums to be as wanted."""
        await until(
            lambda: self.inventory.is_synced and look(self.inventory.totals()),
            explain=lambda: (self.inventory.totals(), self.health.errors),
        )

    async def until_health(self, look):
        """Wait for the reason why it is not ready to be as wanted."""
        await until(
            lambda: look(self.health.not_ready_reason), explain=lambda: self.health.not_ready_reason
        )
        return self.health.not_ready_reason


@contextlib.asynccontextmanager
async def watching(client):
    found = Watching(KubernetesSource(client))
    task = asyncio.create_task(found.collector.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


def resources(cpu, memory=0):
    return Resources(cpu=cpu, memory=memory)


async def test_sums_follow_nodes_and_pods(kube_client, machines):
    await machines.node("a", cpu="4", memory="8Gi")
    await machines.pod("p", "a", cpu="1500m", memory="1Gi")
    await machines.pod("waits", cpu="1", memory="0")
    async with watching(kube_client) as seen:
        await seen.until(
            lambda sums: (
                sums.capacity == resources(4000, 8 * GI)
                and sums.allocated == resources(1500, GI)
                and sums.pending == resources(1000)
            )
        )
        await machines.node_says("a", allocatable={"cpu": "3900m", "memory": "7Gi"})
        await seen.until(lambda sums: sums.allocatable == resources(3900, 7 * GI))
        await machines.bind("waits", "a")
        await seen.until(lambda sums: sums.allocated.cpu == 2500 and not sums.pending.cpu)
        await machines.pod_says("p", phase="Succeeded")
        await seen.until(lambda sums: sums.allocated == resources(1000))
        await machines.remove_pod("waits")
        await seen.until(lambda sums: sums.allocated == Resources() and sums.pods == 0)
        await machines.remove_node("a")
        await seen.until(lambda sums: sums.capacity == Resources() and sums.nodes == 0)


async def test_nodes_that_cannot_lend_do_not_count(kube_client, machines):
    for number in range(4):
        await machines.node(f"n{number}", cpu="1")
    async with watching(kube_client) as seen:
        await seen.until(lambda sums: sums.capacity.cpu == 4000)
        await machines.node_says("n0", conditions=[READY[0] | {"status": "Unknown"}])
        await seen.until(lambda sums: sums.capacity.cpu == 3000)
        await machines.cordon("n1")
        await seen.until(lambda sums: sums.capacity.cpu == 2000)
        await machines.label("n2", {"liqo.io/type": "virtual-node"})
        await seen.until(lambda sums: sums.capacity.cpu == 1000)


async def test_pod_that_finishes_leaves_the_selection_as_if_it_were_deleted(kube_client, machines):
    pods = {phase: await machines.pod(phase.lower(), "a") for phase in ("Failed", "Succeeded")}
    async with contextlib.aclosing(KubernetesSource(kube_client).changes()) as changes:
        first = await anext(changes)
        assert isinstance(first, Snapshot)
        assert [pod.id for pod in first.pods] == list(pods.values())
        for phase, uid in pods.items():
            await machines.pod_says(phase.lower(), phase=phase)
            assert await anext(changes) == PodDeleted(uid)
    async with contextlib.aclosing(KubernetesSource(kube_client).changes()) as changes:
        assert await anext(changes) == Snapshot([], [])


async def test_recreated_pod_is_another_and_what_changes_nothing_is_not_reported(
    kube_client, machines
):
    await machines.node("a")
    old = await machines.pod("p", "a", cpu="1")
    async with contextlib.aclosing(KubernetesSource(kube_client).changes()) as changes:
        await anext(changes)
        await machines.pod_says("p", phase="Running", message="all is well")
        pressure = {"type": "DiskPressure", "status": "False"}
        await machines.node_says("a", conditions=[*READY, pressure])
        await machines.remove_pod("p")
        new = await machines.pod("p", "a", cpu="2")
        assert await anext(changes) == PodDeleted(old)
        assert await anext(changes) == Pod(new, "a", resources(2000, 64 << 20))


async def test_pod_that_cannot_be_decoded_is_skipped_and_logged_once(kube_client, machines):
    """The server lets in what is larger than any machine, and no sum could hold it."""
    await machines.pod("odd", "a", cpu="9223372036854775807")
    good = await machines.pod("good", "a")
    with capture_logs() as logs:
        async with contextlib.aclosing(KubernetesSource(kube_client).changes()) as changes:
            first = await anext(changes)
            assert isinstance(first, Snapshot)
            assert [pod.id for pod in first.pods] == [good]
            await machines.pod_says("odd", message="still here")
            await machines.remove_pod("odd")
            await machines.remove_pod("good")
            assert await anext(changes) == PodDeleted(good)
    text = "Skipping object that cannot be decoded"
    [skipped] = [line for line in logs if line["event"] == text]
    assert skipped["name"] == "default/odd"
    assert "pod default/odd: cpu: is out of range" in skipped["error"]


# -- permissions


async def test_missing_permission_is_reported_and_waited_for(kube, machines):
    await machines.node("a", cpu="4")
    user = f"agent-{secrets.token_hex(4)}"
    async with kube_objects.opened(kube, user) as client, watching(client) as seen:
        unready = await seen.until_health(lambda problem: "pods" in problem and "nodes" in problem)
        assert f'cannot watch nodes: nodes is forbidden: User "{user}" cannot list' in unready
        with pytest.raises(Forbidden):
            await seen.source.identity()
        kube_roles.grant(kube, user)
        await seen.until(lambda sums: sums.capacity.cpu == 4000)
        await seen.until_health(lambda problem: not problem)
        assert await seen.source.identity()
