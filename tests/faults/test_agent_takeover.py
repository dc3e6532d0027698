"""Two agents with one identity: the second reports why it waits, does nothing, and takes over when it can."""

import asyncio
import signal
from collections import Counter
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

import agents
import tcp_cuts
from kubelend.agent import stream
from kubelend.broker import agent_sessions
from kubelend.communicators.factory import Middleware
from kubelend.core.errors import IdentityInUse
from kubelend.wire.objects import (
    Advertisement,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)
from waiting import FACTOR, until, until_resolved

pytestmark = pytest.mark.filterwarnings(agents.LEFT_SOCKETS)


class CallCounter(Middleware):
    """Counts calls by name."""

    def __init__(self, inner, calls):
        super().__init__(inner)
        self._calls = calls

    async def wrap_call(self, name, call):
        self._calls[name] += 1
        return await call()


class CountingAgent(agents.Agent):
    """Counts its calls."""

    def __init__(self, name, settings):
        super().__init__(name, settings)
        self.calls: Counter[str] = Counter()
        self.wrap = lambda inner: CallCounter(inner, self.calls)


@asynccontextmanager
async def second(first, *, settings=None, objects=None):
    """Another agent with the identity of the first: in a cluster of its own, unless it has its objects."""
    agent = CountingAgent(first.name, settings or first.settings)
    agent.objects = objects or agent.objects
    await agent.start()
    try:
        yield agent
    finally:
        await agent.kill()


async def lent_and_borrowed(first, other):
    """Each borrows from the other."""
    await first.create_request("w", target_cluster_id=other.name)
    await other.create_request("w", target_cluster_id=first.name)
    await first.becomes("w", "Active")
    await other.becomes("w", "Active")


async def refused(agent, times):
    """Waits until it has tried so often, and reports why it does nothing."""

    async def look():
        unready = agent.process.health.not_ready_reason
        if unready.count("another agent is active for one since") < 2:
            return f"it reports {unready!r}"
        return "" if agent.calls["publish"] >= times else f"calls are {agent.calls}"

    await until_resolved(look)
    assert {"publisher", "stream"} <= agent.problems.keys()
    assert (
        "stop it, or issue a separate certificate for this cluster" in agent.problems["publisher"]
    )


async def test_second_agent_reports_why_it_waits_and_does_nothing(scene, monkeypatch):
    # It may read the instructions, but must not act on them.
    monkeypatch.setattr(stream, "PERMANENT_ERROR_INTERVAL", timedelta(milliseconds=200))
    other = await scene.start("other", scene.broker.port)
    often = timedelta(milliseconds=300)
    one = await scene.start("one", scene.broker.port, advertisement_requeue_interval=often)
    await lent_and_borrowed(one, other)
    async with second(one) as two:
        await two.create_request("mine")
        await refused(two, times=3)
        await until(lambda: two.calls["instructions"] > 2)
        assert await two.objects.list(ReservationInstruction) == []
        assert await two.objects.list(ProviderInstruction) == []
        assert set(two.calls) <= {"publish", "instructions", "find"}
        (mine,) = await two.objects.list(ResourceRequest)
        assert (mine.status.phase, mine.metadata.finalizers) == ("", ())
        (shown,) = await two.objects.list(Advertisement)
        assert (shown.status.phase, shown.status.published) == ("Error", False)
        assert "another agent is active for one" in shown.status.message
        assert len(await agents.until_agreed(scene.broker, one, other)) == 2
        await agents.until_over(scene.broker, one, other)


async def test_second_agent_in_the_same_cluster_leaves_the_objects_alone_until_the_first_ends(
    certificates, tmp_path
):
    """As during the update of a deployment: both see the objects, one acts, and the other takes over soon."""
    settings = {"grace": agent_sessions.RECONNECT_GRACE, "agent_timeout": agents.HOUR}
    async with agents.scene(certificates, tmp_path, **settings) as (broker, start, _):
        other = await start("other", broker.port)
        slow = timedelta(minutes=4)
        one = await start("one", broker.port, advertisement_requeue_interval=slow)
        await lent_and_borrowed(one, other)
        async with second(one, objects=one.objects) as two:
            await refused(two, times=1)
            for number in range(8):
                await one.create_request(f"w{number}")
            await refused(two, times=3)
            for number in range(8):
                await one.becomes(f"w{number}", "Active")
            assert len(await agents.until_agreed(broker, one, other)) == 10
            await one.kill()
            await two.wait_until_ready()
            await two.create_request("more")
            await two.becomes("more", "Active")
            assert len(await agents.until_agreed(broker, two, other)) == 11
            await agents.until_over(broker, two, other)


async def test_agent_that_was_cut_off_for_too_long_is_replaced(certificates, tmp_path):
    limit = timedelta(seconds=2 * FACTOR)
    async with (
        agents.scene(certificates, tmp_path, agent_timeout=limit) as (broker, start, _),
        tcp_cuts.network(broker.port) as line,
    ):
        other = await start("other", broker.port)
        one = await start("one", line.port, broker_timeout=limit / 4)
        await lent_and_borrowed(one, other)
        direct = agents.made_for("one", broker.port, certificates, tmp_path, agents.SOME)
        async with second(one, settings=direct, objects=one.objects) as two:
            await refused(two, times=1)
            line.cut()
            await two.wait_until_ready()
            line.mend()
            with pytest.raises(IdentityInUse, match="another agent is active for one since"):
                await one.ends()
            await two.create_request("more")
            await two.becomes("more", "Active")
            assert len(await agents.until_agreed(broker, two, other)) == 3
            await agents.until_over(broker, two, other)


QUICKLY = 9.0 * FACTOR
"""Seconds until the second process has taken over."""


@pytest.mark.timeout(120)
async def test_second_process_reports_why_it_waits_and_takes_over_from_a_killed_one(
    start_agent, cluster_of
):
    one, lender = start_agent("one"), start_agent("lender")
    await asyncio.to_thread(one.wait_until_ready)
    await asyncio.to_thread(lender.wait_until_ready)
    two = start_agent("one", directory="two")
    await asyncio.to_thread(two.wait_for, lambda: reports_why(two))
    assert two.get("/healthz") == (200, "ok")
    unhealthy = [line for line in two.log() if "component" in line and "error" in line]
    assert Counter(line["component"] for line in unhealthy) == {"publisher": 1, "stream": 1}
    for line in unhealthy:
        assert "another agent is active for one since" in line["error"]
    assert one.get("/readyz")[0] == 200
    assert await asyncio.to_thread(one.end, signal.SIGKILL) == -signal.SIGKILL
    await asyncio.to_thread(two.wait_for, lambda: two.get("/readyz")[0] == 200, QUICKLY)
    users = cluster_of("two")
    await users.create_request("w")
    await users.becomes("w", "Reserved")
    assert await asyncio.to_thread(two.end) == 0


def reports_why(agent):
    status, text = agent.get("/readyz")
    return status == 503 and text.count("another agent is active for one since") == 2
