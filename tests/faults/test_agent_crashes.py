"""Agents that crash at any point of their work: the next run repairs it, and nothing is reserved twice."""

import asyncio
import random
import signal

import pytest
import structlog

import agents
import crash_points
from kubelend.communicators.factory import Middleware
from kubelend.wire.objects import ProviderInstruction, ResourceRequest
from waiting import until_resolved

REQUESTING = {
    "before the finalizer is set": ("before", "apply ResourceRequest"),
    "before the idempotency key is stored": ("before", "set_status ResourceRequest"),
    "before the request is sent": ("before", "request"),
    "before the response is received": ("after", "request"),
    "before the response is stored": ("before", "set_status ResourceRequest", 2),
    "after the response is stored": ("after", "set_status ResourceRequest", 2),
    "before the instruction is written": ("before", "apply ReservationInstruction"),
    "after the instruction is written": ("after", "apply ReservationInstruction"),
    "before the instruction is delivered": ("before", "set_status ReservationInstruction"),
    "before it is activated": ("before", "activate"),
    "after it is activated": ("after", "activate"),
}
HOLDING = {
    "before it is received": ("before", "instruction"),
    "before the object is written": ("before", "apply ProviderInstruction"),
    "after the object is written": ("after", "apply ProviderInstruction"),
    "before it is acknowledged": ("before", "acknowledge"),
    "after it is acknowledged": ("after", "acknowledge"),
    "before the status is set": ("before", "set_status ProviderInstruction"),
    "after the status is set": ("after", "set_status ProviderInstruction"),
}
ENDING = {
    "before it is released": ("borrower", "before", "release"),
    "after it is released": ("borrower", "after", "release"),
    "before the finalizer is removed": ("borrower", "before", "apply ResourceRequest"),
    "after the finalizer is removed": ("borrower", "after", "apply ResourceRequest"),
    "before the instruction is finished": (
        *("borrower", "before", "set_status ReservationInstruction"),
    ),
    "before the provider receives it": ("lender", "before", "instruction"),
    "before the provider sets the status": ("lender", "before", "set_status ProviderInstruction"),
    "after the provider sets the status": ("lender", "after", "set_status ProviderInstruction"),
}


def table(points):
    return pytest.mark.parametrize("point", points.values(), ids=points.keys())


class Crashing:
    """A lender and a borrower, each with the crash point of its present run."""

    def __init__(self, broker):
        self.broker = broker
        self.agents, self.points = {}, {}

    def install(self, agent):
        self.agents[agent.name] = agent
        self.points[agent.name] = crash_points.install(agent)

    def __getitem__(self, name):
        return self.agents[name]

    async def crash(self, name):
        """It crashes at its point."""
        await self.points[name].reached()
        await self[name].kill()

    async def restart(self, name):
        """Another one starts with the objects that are left."""
        self.install(self[name])
        await self[name].start()

    async def assert_one_reservation(self):
        """And there never was another."""
        (reservation,) = await agents.until_agreed(self.broker, *self.agents.values())
        every = await self.broker.viewer().read("reservations")
        assert [found["id"] for found in every["reservations"]] == [reservation]

    async def until_over(self):
        await agents.until_over(self.broker, *self.agents.values())


@pytest.fixture
async def pair(scene):
    found = Crashing(scene.broker)
    for name, cluster in (("lender", agents.SOME), ("borrower", agents.NOTHING)):
        await scene.start(name, scene.broker.port, cluster=cluster, prepare=found.install)
    return found


@table(REQUESTING)
async def test_requester_that_crashes_while_it_requests_has_one_reservation(pair, point):
    """And none, if the request is deleted while no agent runs."""
    borrower = pair["borrower"]
    pair.points["borrower"].at(*point)
    await borrower.create_request("kept")
    await pair.crash("borrower")
    await pair.restart("borrower")
    await borrower.becomes("kept", "Active")
    await pair.assert_one_reservation()
    pair.points["borrower"].at(*point)
    await borrower.create_request("dropped")
    await pair.crash("borrower")
    await borrower.delete_request("dropped")
    await pair.restart("borrower")
    await borrower.wait_deleted("dropped")
    kept = (await borrower.request("kept")).status.reservation_name
    assert list(await agents.until_agreed(pair.broker, *pair.agents.values())) == [kept]
    await pair.until_over()


@table(HOLDING)
async def test_provider_that_crashes_while_it_reserves_holds_it_once(pair, point):
    pair.points["lender"].at(*point)
    await pair["borrower"].create_request("w")
    await pair.crash("lender")
    await pair.restart("lender")
    await pair["borrower"].becomes("w", "Active")
    await pair.assert_one_reservation()
    await until_resolved(lambda: unacknowledged(pair.broker))
    await pair.until_over()


async def unacknowledged(broker):
    found = await agents.open_reservations(broker)
    return ", ".join(name for name, one in found.items() if "acknowledgedAt" not in one["status"])


@table(ENDING)
async def test_agent_that_crashes_while_a_reservation_ends_leaves_nothing(pair, point):
    name, *operation = point
    await pair["borrower"].create_request("w")
    await pair["borrower"].becomes("w", "Active")
    await pair.assert_one_reservation()
    pair.points[name].at(*operation)
    await pair["borrower"].delete_request("w")
    await pair.crash(name)
    await pair.restart(name)
    await pair.until_over()


# -- components


class Unexpected(Exception):
    """Not one of our errors, so it is not retried."""


class BrokenObjects:
    """One kind cannot be watched."""

    def __init__(self, inner, kind):
        self._inner = inner
        self._kind = kind

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def watch(self, kind):
        if kind is self._kind:
            raise Unexpected(f"no {kind.plural}")
        async for event in self._inner.watch(kind):
            yield event


class BrokenCalls(Middleware):
    """One call fails."""

    def __init__(self, inner, name):
        super().__init__(inner)
        self._name = name

    async def wrap_call(self, name, call):
        if name == self._name:
            raise Unexpected(f"no {name}")
        return await call()

    async def stream(self, on_reset):
        if self._name == "stream":
            raise Unexpected("no stream")
        async for instruction in self._inner.stream(on_reset):
            yield instruction


@pytest.mark.parametrize(
    "component, call, kind",
    [
        ("publisher", "publish", None),
        ("stream", "stream", None),
        ("requester", "", ResourceRequest),
        ("provider", "", ProviderInstruction),
        ("peering", "activate", None),
    ],
)
async def test_failed_component_ends_the_agent_with_its_reason(
    certificates, tmp_path, component, call, kind
):
    async with agents.scene(certificates, tmp_path) as (broker, start, _):
        await start("lender", broker.port)
        agent = await start("a", broker.port, cluster=agents.NOTHING)
        await agent.kill()
        agent.wrap = lambda inner: BrokenCalls(inner, call)
        agent.wrap_objects = lambda inner: BrokenObjects(inner, kind)
        await agent.create_request("w")
        with structlog.testing.capture_logs() as log:
            await agent.start()
            with pytest.raises(Unexpected) as reason:
                await agent.ends()
        assert str(reason.value) == f"no {kind.plural if kind else call}"
        failed = [line for line in log if line["event"] == "Root task failed"]
        assert failed[-1]["task"] == component
        await agent.kill()


# -- processes

REQUESTS = 3


async def ready(agent):
    await asyncio.to_thread(agent.wait_until_ready)


async def killed_soon(agent):
    """Within the half second in which it has most to do."""
    await asyncio.sleep(random.uniform(0.0, 0.5))
    assert await asyncio.to_thread(agent.end, signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings(agents.LEFT_SOCKETS)
async def test_killed_processes_leave_one_reservation_for_each_request(
    child_broker, start_agent, cluster_of
):
    running = {name: start_agent(name) for name in ("borrower", "lender")}
    for agent in running.values():
        await ready(agent)
    borrower, lender = cluster_of("borrower"), cluster_of("lender")
    for victim in ("borrower", "lender"):
        for number in range(REQUESTS):
            await borrower.create_request(
                f"w{number}-{victim}", cpu="100m", target_cluster_id="lender"
            )
            if victim == "lender":
                await borrower.delete_request(f"w{number}-borrower")
        await killed_soon(running[victim])
        running[victim] = start_agent(victim)
        await ready(running[victim])
    for number in range(REQUESTS):
        await borrower.becomes(f"w{number}-lender", "Reserved")
        await borrower.wait_deleted(f"w{number}-borrower")
    assert len(await agents.until_agreed(child_broker, borrower, lender)) == REQUESTS
    await agents.until_over(child_broker, borrower, lender)
