"""What an agent sees of a real cluster: the sums of its nodes and pods, whatever the API server does."""

import asyncio
import contextlib
import secrets

import msgspec
import pytest
from structlog.testing import capture_logs

import kube_objects
import kube_roles
from kube_objects import READY, Machines
from kubelend.agent.collector import Collector
from kubelend.agent.health import ComponentHealth
from kubelend.agent.ports import PodDeleted, Snapshot
from kubelend.core.errors import Forbidden
from kubelend.core.inventory import Inventory
from kubelend.core.pod_requests import Pod
from kubelend.core.resources import Resources
from kubelend.sources.kubernetes import KubernetesSource
from waiting import until, until_resolved

pytestmark = pytest.mark.timeout(120)

GI = 1 << 30


@pytest.fixture
async def machines(kube_client):
    machines = Machines(kube_client)
    await machines.clear()
    yield machines
    await machines.clear()


class Watching:
    """What a collector makes of a source."""

    def __init__(self, source):
        self.source = source
        self.inventory = Inventory()
        self.standing = ComponentHealth()

    @contextlib.asynccontextmanager
    async def running(self):
        collector = Collector(self.source, self.inventory, self.standing, lambda: None)
        task = asyncio.create_task(collector.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def until(self, look):
        """Wait for the sums to be as wanted."""
        await until(
            lambda: self.inventory.is_synced and look(self.inventory.totals()),
            explain=lambda: (self.inventory.totals(), self.standing.errors),
        )

    async def until_standing(self, look):
        async def problem():
            unready = self.standing.not_ready_reason
            return "" if look(unready) else f"it stands at {unready!r}"

        await until_resolved(problem)
        return self.standing.not_ready_reason


@contextlib.asynccontextmanager
async def watching(client):
    async with Watching(KubernetesSource(client)).running() as found:
        yield found


def resources(cpu, memory=0):
    return Resources(cpu=cpu, memory=memory)


async def test_identity_is_the_uid_of_kube_system(kube, kube_client):
    found = msgspec.json.decode(kube.call("GET", "/api/v1/namespaces/kube-system"))
    assert await KubernetesSource(kube_client).identity() == found["metadata"]["uid"]


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


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(
            lambda machines: machines.node_says("a", conditions=[READY[0] | {"status": "Unknown"}]),
            id="not ready",
        ),
        pytest.param(lambda machines: machines.cordon("a"), id="cordoned"),
        pytest.param(
            lambda machines: machines.label("a", {"liqo.io/type": "virtual-node"}), id="virtual"
        ),
    ],
)
async def test_nodes_that_cannot_lend_do_not_count(kube_client, machines, spoil):
    await machines.node("a", cpu="4")
    await machines.node("b", cpu="1")
    async with watching(kube_client) as seen:
        await seen.until(lambda sums: sums.capacity.cpu == 5000)
        await spoil(machines)
        await seen.until(lambda sums: sums.capacity.cpu == 1000)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_pod_that_finishes_leaves_the_selection_as_if_it_were_deleted(
    kube_client, machines, phase
):
    uid = await machines.pod("p", "a")
    async with contextlib.aclosing(KubernetesSource(kube_client).changes()) as changes:
        first = await anext(changes)
        assert isinstance(first, Snapshot)
        assert [pod.id for pod in first.pods] == [uid]
        await machines.pod_says("p", phase=phase)
        assert await anext(changes) == PodDeleted(uid)
    async with contextlib.aclosing(KubernetesSource(kube_client).changes()) as changes:
        assert await anext(changes) == Snapshot([], [])


async def test_pod_made_anew_under_its_name_is_another(kube_client, machines):
    old = await machines.pod("p", "a", cpu="1")
    async with contextlib.aclosing(KubernetesSource(kube_client).changes()) as changes:
        await anext(changes)
        await machines.remove_pod("p")
        new = await machines.pod("p", "a", cpu="2")
        assert await anext(changes) == PodDeleted(old)
        assert await anext(changes) == Pod(new, "a", resources(2000, 64 << 20))


async def test_what_says_nothing_new_is_not_told(kube_client, machines):
    await machines.node("a")
    uid = await machines.pod("p", "a")
    async with contextlib.aclosing(KubernetesSource(kube_client).changes()) as changes:
        await anext(changes)
        await machines.pod_says("p", phase="Running", message="all is well")
        await machines.node_says(
            "a", conditions=[*READY, {"type": "DiskPressure", "status": "False"}]
        )
        await machines.remove_pod("p")
        assert await anext(changes) == PodDeleted(uid)


async def test_pod_that_cannot_be_read_is_left_out_and_said_once(kube_client, machines):
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


# -- troubles


async def test_missing_permission_is_told_and_waited_for(kube, machines):
    await machines.node("a", cpu="4")
    user = f"agent-{secrets.token_hex(4)}"
    async with kube_objects.opened(kube, user) as client, watching(client) as seen:
        unready = await seen.until_standing(
            lambda problem: "pods" in problem and "nodes" in problem
        )
        assert f'cannot watch nodes: nodes is forbidden: User "{user}" cannot list' in unready
        with pytest.raises(Forbidden):
            await seen.source.identity()
        kube_roles.grant(kube, user)
        await seen.until(lambda sums: sums.capacity.cpu == 4000)
        await seen.until_standing(lambda problem: not problem)
        assert await seen.source.identity()


async def test_restart_of_the_api_server_is_survived(clusters):
    [cluster] = clusters()
    async with kube_objects.opened(cluster) as client, watching(client) as seen:
        machines = Machines(client)
        await machines.node("a", cpu="4")
        await machines.pod("p", "a", cpu="1")
        await seen.until(lambda sums: sums.allocated.cpu == 1000)
        await asyncio.to_thread(cluster.kill)
        assert "cannot watch" in await seen.until_standing(bool)
        assert seen.inventory.totals().allocated.cpu == 1000
        cluster.start()
        await asyncio.to_thread(cluster.wait_until_ready)
        await machines.remove_pod("p")
        await machines.pod("q", "a", cpu="2")
        await seen.until(lambda sums: sums.allocated.cpu == 2000 and sums.pods == 1)
        await seen.until_standing(lambda problem: not problem)
