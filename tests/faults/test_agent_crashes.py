"""Agents that crash at any point of their work: the next run repairs it, and nothing is reserved twice."""

import asyncio
import random
import signal

import pytest
import structlog

import agents
import crash_points
from kubelend.communicators.middleware import Middleware
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
RELEASING = {
    "before it is released": ("before", "release"),
    "after it is released": ("after", "release"),
    "before the finalizer is removed": ("before", "apply ResourceRequest"),
    "after the finalizer is removed": ("after", "apply ResourceRequest"),
    "before the instruction is finished": ("before", "set_status ReservationInstruction"),
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
WITHDRAWING = {
    "before it is received": ("before", "instruction"),
    "before the status is set": ("before", "set_status ProviderInstruction"),
    "after the status is set": ("after", "set_status ProviderInstruction"),
}


def table(points):
    return pytest.mark.parametrize("point", points.values(), ids=points.keys())


@pytest.fixture
def crash_of():
    """The crash points by the names of the agents."""
    return {}


@pytest.fixture
async def lender(scene, crash_of):
    return await scene.start("lender", scene.broker.port, prepare=crashing(crash_of))


@pytest.fixture
async def borrower(scene, crash_of):
    nothing = agents.NOTHING
    return await scene.start(
        "borrower", scene.broker.port, cluster=nothing, prepare=crashing(crash_of)
    )


def crashing(crash_of):
    def bind(agent):
        crash_of[agent.name] = crash_points.install(agent)

    return bind


async def restarted(agent, crash):
    """It crashes at its point, and another one starts with the objects that it has left."""
    await crash.reached()
    await agent.kill()
    crash_points.install(agent)
    await agent.start()


async def assert_one_reservation(scene, *members):
    """And there never was another."""
    (reservation,) = await agents.until_agreed(scene.broker, *members)
    every = await scene.broker.viewer().read("reservations")
    assert [found["id"] for found in every["reservations"]] == [reservation]


@table(REQUESTING)
async def test_requester_that_crashes_while_it_requests_has_one_reservation(
    scene, lender, borrower, crash_of, point
):
    crash = crash_of["borrower"]
    crash.at(*point)
    await borrower.create_request("w")
    await restarted(borrower, crash)
    await borrower.becomes("w", "Active")
    await assert_one_reservation(scene, lender, borrower)
    await agents.until_over(scene.broker, lender, borrower)


@table(REQUESTING)
async def test_request_that_is_deleted_while_no_agent_runs_leaves_nothing(
    scene, lender, borrower, crash_of, point
):
    crash = crash_of["borrower"]
    crash.at(*point)
    await borrower.create_request("w")
    await crash.reached()
    await borrower.kill()
    await borrower.delete_request("w")
    crash_points.install(borrower)
    await borrower.start()
    await agents.until_over(scene.broker, lender, borrower)


@table(RELEASING)
async def test_requester_that_crashes_while_it_releases_releases(
    scene, lender, borrower, crash_of, point
):
    crash = crash_of["borrower"]
    await borrower.create_request("w")
    await borrower.becomes("w", "Active")
    await assert_one_reservation(scene, lender, borrower)
    crash.at(*point)
    await borrower.delete_request("w")
    await restarted(borrower, crash)
    await agents.until_over(scene.broker, lender, borrower)


@table(HOLDING)
async def test_provider_that_crashes_while_it_reserves_holds_it_once(
    scene, lender, borrower, crash_of, point
):
    crash = crash_of["lender"]
    crash.at(*point)
    await borrower.create_request("w")
    await restarted(lender, crash)
    await borrower.becomes("w", "Active")
    await assert_one_reservation(scene, lender, borrower)
    await until_resolved(lambda: unacknowledged(scene.broker))
    await agents.until_over(scene.broker, lender, borrower)


async def unacknowledged(broker):
    found = await agents.open_reservations(broker)
    return ", ".join(name for name, one in found.items() if "acknowledgedAt" not in one["status"])


@table(WITHDRAWING)
async def test_provider_that_crashes_while_it_withdraws_holds_nothing(
    scene, lender, borrower, crash_of, point
):
    crash = crash_of["lender"]
    await borrower.create_request("w")
    await borrower.becomes("w", "Active")
    await assert_one_reservation(scene, lender, borrower)
    crash.at(*point)
    await borrower.delete_request("w")
    await restarted(lender, crash)
    await agents.until_over(scene.broker, lender, borrower)


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
        agent.spoil = lambda inner: BrokenObjects(inner, kind)
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
