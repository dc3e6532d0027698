"""What a collector relies on, wherever nodes and pods are. A new kind is one more stage.

A stage has the source and can make things happen: `stir` has pods (in a real cluster nodes too) come, go and
change, and `truth` says what is there, by other means than the source.
"""

import asyncio
from contextlib import aclosing
from datetime import timedelta

import pytest

import kube_objects
import make
from kube_objects import Machines
from kubelend.agent.ports import ClusterSource, NodeDeleted, PodDeleted, Snapshot
from kubelend.core.pod_requests import Node, Pod
from kubelend.sources import simulation_spec
from kubelend.sources.kubernetes import KubernetesSource
from kubelend.sources.simulation import SimulatedCluster, SimulatedSource
from waiting import PATIENCE


class SimulatedStage:
    """Its time passes by `stir` alone."""

    DESCRIPTION = simulation_spec.parse_simulation_spec(
        """
        seed: 5
        nodes: [{count: 3, capacity: {cpu: 2, memory: 4Gi}, labels: {zone: a}}]
        pods: [{count: 4, requests: {cpu: 100m, memory: 64Mi}}]
        work: [{rate: 10/s, requests: {cpu: 50m..400m}, lifetime: 1s..4s}]
        """,
        "test",
    )

    def __init__(self):
        self._now = make.T0
        self._world = SimulatedCluster(self.DESCRIPTION)
        self._source = self.another()

    @property
    def source(self) -> ClusterSource:
        return self._source

    def another(self) -> ClusterSource:
        """A source of the same cluster, in a process that was started later."""
        return SimulatedSource(self.DESCRIPTION, lambda: self._now)

    async def stir(self):
        self._now += timedelta(seconds=5)
        elapsed = (self._now - make.T0) // timedelta(microseconds=1)
        while (self._world.next_at or 0) <= elapsed:
            self._world.step()

    async def truth(self):
        return self._world.snapshot()


class KubernetesStage:
    """The nodes and pods of an API server, made and changed by other calls than the source's."""

    def __init__(self, client):
        self.source: ClusterSource = KubernetesSource(client)
        self._client = client
        self._machines = Machines(client)
        self._round = 0

    async def set(self):
        await self._machines.clear()
        for number in range(3):
            await self._machines.node(f"old-{number}", labels={"zone": "a"})
            await self._machines.pod(f"first-{number}", f"old-{number}")

    def another(self) -> ClusterSource:
        return KubernetesSource(self._client)

    async def stir(self):
        """A node is replaced, with its pods; others finish, are scheduled, come and go."""
        number, machines = self._round, self._machines
        self._round += 1
        if number < 2:
            await machines.remove_pod(f"first-{number}")
            await machines.remove_node(f"old-{number}")
            await machines.node(f"new-{number}", cpu="2")
        await machines.node_says("old-2", conditions=[{"type": "Ready", "status": f"{number % 2}"}])
        for node in ("old-2", "new-0", ""):
            await machines.pod(f"{node or 'no'}-{number}", node, cpu=f"{number + 1}")
        await machines.pod_says(f"old-2-{number}", phase="Succeeded")
        await machines.bind(f"no-{number}", "new-0")
        if number:
            await machines.remove_pod(f"new-0-{number - 1}")

    async def truth(self):
        return await self._machines.all()

    async def clear(self):
        await self._machines.clear()


@pytest.fixture(params=["simulated", pytest.param("kubernetes", marks=pytest.mark.kube)])
async def stage(request):
    if request.param == "simulated":
        yield SimulatedStage()
        return
    async with kube_objects.opened(request.getfixturevalue("kube")) as client:
        stage = KubernetesStage(client)
        await stage.set()
        yield stage
        await stage.clear()


class Picture:
    """What a consumer knows by the changes that it received."""

    def __init__(self):
        self.nodes = {}
        self.pods = {}

    def take(self, change):
        match change:
            case Snapshot():
                self.nodes = {node.name: node for node in change.nodes}
                self.pods = {pod.id: pod for pod in change.pods}
            case Node():
                self.nodes[change.name] = change
            case NodeDeleted():
                self.nodes.pop(change.name, None)
            case Pod():
                self.pods[change.id] = change
            case PodDeleted():
                self.pods.pop(change.id, None)

    def shows(self, truth):
        return self.nodes == {node.name: node for node in truth.nodes} and self.pods == {
            pod.id: pod for pod in truth.pods
        }


async def follow(changes, picture, truth):
    """Take changes until the picture is right."""
    async with asyncio.timeout(PATIENCE):
        while not picture.shows(truth):
            picture.take(await anext(changes))


async def test_first_comes_a_snapshot_of_all_that_is_there(stage):
    async with aclosing(stage.source.changes()) as changes:
        first = await anext(changes)
    assert isinstance(first, Snapshot)
    picture = Picture()
    picture.take(first)
    assert picture.shows(await stage.truth())
    assert picture.nodes
    assert len(picture.nodes) == len(first.nodes)
    assert len(picture.pods) == len(first.pods)
    assert stage.source.problem == ""


async def test_changes_applied_to_the_snapshot_give_what_is_there_to_every_consumer(stage):
    one, two = Picture(), Picture()
    async with (
        aclosing(stage.source.changes()) as first,
        aclosing(stage.source.changes()) as second,
    ):
        one.take(await anext(first))
        two.take(await anext(second))
        for _ in range(5):
            before = await stage.truth()
            await stage.stir()
            assert await stage.truth() != before
            await follow(first, one, await stage.truth())
            await follow(second, two, await stage.truth())
            nodes = {pod.node for pod in one.pods.values() if pod.node}
            assert nodes
            assert nodes <= one.nodes.keys(), "scheduled pods are on nodes that are known"


async def test_called_anew_it_begins_with_a_snapshot_of_the_present(stage):
    async with aclosing(stage.source.changes()) as changes:
        await anext(changes)
    await stage.stir()
    picture = Picture()
    async with aclosing(stage.source.changes()) as changes:
        first = await anext(changes)
        assert isinstance(first, Snapshot)
        picture.take(first)
        await follow(changes, picture, await stage.truth())
        await stage.stir()
        await follow(changes, picture, await stage.truth())


async def test_identity_stays(stage):
    identity = await stage.source.identity()
    assert identity
    await stage.stir()
    assert await stage.source.identity() == identity
    assert await stage.another().identity() == identity
