"""Changes of the cluster are in the inventory at once, and a source that fails is reported once."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

import make
from kubelend.agent.collector import Collector
from kubelend.agent.health import ComponentHealth
from kubelend.agent.ports import Change, NodeDeleted, PodDeleted, Snapshot
from kubelend.core.errors import InvalidQuantity, KubelendError, Unavailable
from kubelend.core.inventory import Hold, Inventory
from kubelend.core.pod_requests import Node, Pod
from virtual_time import in_virtual_time, settled, stopped

TEN = make.resources("cpu=10,memory=10Gi")
ONE = make.resources("cpu=1,memory=1Gi")


class ScriptedSource:
    """Yields the changes of `send`; an error ends it, and None ends it without one."""

    def __init__(self):
        self.problem = ""
        self.opened: list[float] = []
        self.closed = 0
        self._script: asyncio.Queue[Change | KubelendError | None] = asyncio.Queue()

    async def identity(self):
        return "a"

    async def changes(self):
        self.opened.append(asyncio.get_running_loop().time())
        try:
            while (change := await self._script.get()) is not None:
                if isinstance(change, KubelendError):
                    raise change
                yield change
        finally:
            self.closed += 1

    def send(self, *changes):
        for change in changes:
            self._script.put_nowait(change)


class Rig:
    def __init__(self):
        self.source, self.inventory = ScriptedSource(), Inventory()
        self.health = ComponentHealth()
        self.notified: list[int] = []
        self.collector = Collector(
            self.source,
            self.inventory,
            self.health,
            lambda: self.notified.append(self.inventory.totals().allocated.cpu),
        )

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.collector.run())
        yield
        await stopped(task)

    @property
    def cpus(self):
        totals = self.inventory.totals()
        return totals.allocatable.cpu, totals.allocated.cpu


SNAPSHOT = Snapshot([Node("n", TEN, TEN)], [Pod("p", "n", ONE)])


@pytest.mark.parametrize(
    "change, expected",
    [
        pytest.param(Node("m", TEN, TEN), (20_000, 1000), id="node added"),
        pytest.param(Node("n", TEN, ONE), (1000, 1000), id="node modified"),
        pytest.param(NodeDeleted("n"), (0, 0), id="node deleted"),
        pytest.param(Pod("q", "n", ONE), (10_000, 2000), id="pod added"),
        pytest.param(Pod("p", "n", TEN), (10_000, 10_000), id="pod modified"),
        pytest.param(PodDeleted("p"), (10_000, 0), id="pod deleted"),
        pytest.param(Snapshot([Node("m", ONE, ONE)], []), (1000, 0), id="another snapshot"),
    ],
)
@in_virtual_time
async def test_change_is_applied(change, expected):
    rig = Rig()
    async with rig.running():
        rig.source.send(SNAPSHOT)
        await settled()
        assert rig.cpus == (10_000, 1000)
        rig.source.send(change)
        await settled()
        assert rig.cpus == expected
    assert rig.notified == [1000, expected[1]]  # after each change


@in_virtual_time
async def test_measured_after_the_first_snapshot():
    rig = Rig()
    rig.health.require("collector")
    async with rig.running():
        await asyncio.sleep(60)
        assert not rig.collector.measured.is_set()
        assert rig.health.not_ready_reason == "collector: starting"
        rig.source.send(SNAPSHOT)
        await settled()
        assert rig.collector.measured.is_set()
        assert rig.health.not_ready_reason == ""


@in_virtual_time
async def test_holds_survive_another_snapshot():
    rig = Rig()
    rig.inventory.put_hold("r1", Hold("b", ONE))
    async with rig.running():
        rig.source.send(SNAPSHOT, SNAPSHOT)
        await settled()
    assert list(rig.inventory.holds) == ["r1"]


@in_virtual_time
async def test_error_of_the_source_and_its_end_are_logged_once():
    rig = Rig()
    rig.source.send(SNAPSHOT)
    with capture_logs() as logged:
        async with rig.running():
            await asyncio.sleep(10)
            rig.source.problem = "no route to the API server"
            await asyncio.sleep(1)
            assert rig.health.errors == {"collector": "no route to the API server"}
            await asyncio.sleep(3600)
            rig.source.problem = ""
            await asyncio.sleep(1)
            assert rig.health.errors == {}
    assert [line["event"] for line in logged] == ["Component unhealthy", "Component healthy"]


@in_virtual_time
async def test_error_before_the_first_snapshot_is_reported():
    rig = Rig()
    rig.health.require("collector")
    rig.source.problem = "no route to the API server"
    async with rig.running():
        await settled()
        assert rig.health.not_ready_reason == "collector: no route to the API server"
        rig.source.problem = ""
        rig.source.send(SNAPSHOT)
        await settled()
        assert rig.health.not_ready_reason == ""


@pytest.mark.parametrize(
    "end, expected",
    [
        pytest.param(
            InvalidQuantity("pod p: 'x' is not a quantity"), "is not a quantity", id="invalid"
        ),
        pytest.param(Unavailable("gone away"), "gone away", id="unavailable"),
        pytest.param(None, "ended unexpectedly", id="no error"),
    ],
)
@in_virtual_time
async def test_source_that_ends_is_reported_and_reopened(end, expected):
    rig = Rig()
    async with rig.running():
        rig.source.send(SNAPSHOT, end)
        await settled()
        assert expected in rig.health.errors["collector"]
        assert rig.cpus == (10_000, 1000)
        rig.source.send(Snapshot([Node("m", ONE, ONE)], []))
        await asyncio.sleep(2)
        assert rig.health.errors == {}
        assert rig.cpus == (1000, 0)
    assert rig.source.closed == len(rig.source.opened) == 2


@in_virtual_time
async def test_source_that_keeps_ending_is_reopened_with_backoff():
    rig = Rig()
    rig.source.send(*[InvalidQuantity("pod p: 'x' is not a quantity")] * 1000)
    with capture_logs() as logged:
        async with rig.running():
            await asyncio.sleep(600)
    assert 20 <= len(rig.source.opened) <= 50
    assert len(logged) == 1


@in_virtual_time
async def test_source_that_worked_for_long_is_reopened_soon():
    rig = Rig()
    async with rig.running():
        rig.source.send(*[Unavailable("gone away")] * 6)
        await asyncio.sleep(300)
        rig.source.send(SNAPSHOT, Unavailable("gone away"))
        await asyncio.sleep(2)
    assert 300 < rig.source.opened[-1] <= 301
