"""Agents behind a network that is cut, either way, or slow: they wait, and nothing is taken twice."""

import asyncio
import contextlib
from collections import Counter
from datetime import timedelta

import pytest

import agents
import tcp_cuts
from kubelend.api import instructions
from waiting import until_resolved

pytestmark = pytest.mark.filterwarnings(agents.LEFT_SOCKETS)

CUTS = {
    "both ways": {"up": True, "down": True},
    "upwards": {"up": True, "down": False},
    "downwards": {"up": False, "down": True},
}
IMPATIENT = {
    "broker_timeout": timedelta(seconds=0.5),
    "silence": timedelta(seconds=1),
}
LATE = 1.2
"""Seconds: nobody waits so long."""
CONNECTIONS = 6
"""More than the agent uses at a time."""


@pytest.fixture
async def scene(certificates, tmp_path, monkeypatch):
    # A stream shows every moment that it lives, or a short silence would mean nothing.
    monkeypatch.setattr(instructions, "KEEP_ALIVE_SECONDS", 0.2)
    async with agents.scene(certificates, tmp_path) as scene:
        yield scene


@pytest.fixture
async def behind(scene):
    """Starts agents, each with a line of its own to the broker."""
    async with contextlib.AsyncExitStack() as stack:

        async def behind(name, cluster=agents.NOTHING):
            line = await stack.enter_async_context(tcp_cuts.network(scene.broker.port))
            return line, await scene.start(name, line.port, cluster=cluster, **IMPATIENT)

        yield behind


async def at_once(act, members):
    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(act(*member))


def is_unheard(found):
    return (found.status.phase, found.status.reason) == ("Pending", "BrokerUnreachable")


async def test_cut_off_requester_keeps_what_it_has_and_gets_the_rest_afterwards(scene, behind):
    lender = await scene.start("lender", scene.broker.port)
    members = [(way, *await behind(f"r-{number}")) for number, way in enumerate(CUTS)]
    kept = {}

    async def settle(way, line, agent):
        for name in ("kept", "dropped"):
            await agent.create_request(name)
            found = await agent.becomes(name, "Active")
            kept[way, name] = found.status.reservation_name
        line.cut(**CUTS[way])
        await agent.create_request("late")
        await agent.delete_request("dropped")

    async def suffer(way, line, agent):
        late = await agent.shows("late", is_unheard)
        assert "did not answer within" in late.status.message
        dropped = await agent.shows("dropped", lambda found: found.status.reason != "InUse")
        assert dropped.status.message.startswith(
            "Deletion waits until the reservation is released: "
        )
        # What comes down alone still comes: a stream that speaks is not dead.
        parts = {"publisher"} if way == "upwards" else {"publisher", "stream"}
        await until_resolved(lambda: missing(agent, parts))
        assert kept[way, "kept"] in await lender.holds()
        assert kept[way, "kept"] in await agent.uses()

    async def recover(way, line, agent):
        line.mend()
        await agent.becomes("late", "Active")
        await agent.wait_deleted("dropped")
        assert (await agent.request("kept")).status.reservation_name == kept[way, "kept"]

    await at_once(settle, members)
    await at_once(suffer, members)
    await at_once(recover, members)
    borrowers = [agent for _, _, agent in members]
    assert len(await agents.until_agreed(scene.broker, lender, *borrowers)) == 2 * len(CUTS)
    for agent in borrowers:
        await agent.wait_until_ready()
    # However often each was asked for, and whichever of that was heard.
    assert await locks(scene.broker) == {"r-0": 3, "r-1": 3, "r-2": 3}
    await agents.until_over(scene.broker, lender, *borrowers)


async def locks(broker):
    """How many reservations each requester has, or has had."""
    found = (await broker.viewer().read("reservations"))["reservations"]
    return Counter(one["requesterID"] for one in found)


async def missing(agent, parts):
    return ", ".join(parts - agent.problems.keys())


async def test_cut_off_provider_keeps_its_promises_and_hears_of_the_rest_afterwards(scene, behind):
    borrower = await scene.start("borrower", scene.broker.port)
    members = [(way, *await behind(f"p-{number}", agents.SOME)) for number, way in enumerate(CUTS)]

    async def settle(way, line, agent):
        for what in ("kept", "dropped"):
            await borrower.create_request(f"{what}-{agent.name}", target_cluster_id=agent.name)
            await borrower.becomes(f"{what}-{agent.name}", "Active")
        await until_resolved(lambda: held(agent, 2))
        line.cut(**CUTS[way])
        await until_resolved(lambda: missing(agent, {"publisher"}))

    async def suffer(way, line, agent):
        await borrower.create_request(f"late-{agent.name}", target_cluster_id=agent.name)
        found = await borrower.becomes(f"late-{agent.name}", "Reserved")
        name = found.status.reservation_name
        await borrower.delete_request(f"dropped-{agent.name}")
        if way == "upwards":
            await until_resolved(lambda: knows(agent, name))
        else:
            await until_resolved(lambda: missing(agent, {"stream"}))
            assert len(await agent.holds()) == 2
            assert name not in await agent.holds()
        body = (await agents.open_reservations(scene.broker))[name]
        assert "acknowledgedAt" not in body["status"]

    async def recover(way, line, agent):
        line.mend()
        await agent.wait_until_ready()

    await at_once(settle, members)
    await at_once(suffer, members)
    await at_once(recover, members)
    for _, _, agent in members:
        await borrower.wait_deleted(f"dropped-{agent.name}")
    lenders = [agent for _, _, agent in members]

    for agent in lenders:
        # It is used only after its lender has agreed to it.
        await borrower.becomes(f"late-{agent.name}", "Active")
    assert len(await agents.until_agreed(scene.broker, borrower, *lenders)) == 2 * len(CUTS)
    await agents.until_over(scene.broker, borrower, *lenders)


async def held(agent, count):
    holds = await agent.holds()
    return "" if len(holds) == count else f"{agent.name} holds {holds}"


async def knows(agent, reservation):
    holds = await agent.holds()
    return "" if reservation in holds else f"{agent.name} holds {holds}"


async def test_broker_that_is_slow_but_in_time_is_only_slow(scene, behind):
    lender = await scene.start("lender", scene.broker.port)
    line, agent = await behind("r")
    line.slow(up=0.1, down=0.1)
    await agent.create_request("w")
    await agent.becomes("w", "Active")
    await agents.until_agreed(scene.broker, lender, agent)
    assert agent.problems == {}
    await agents.until_over(scene.broker, lender, agent)


async def untaken(broker, count):
    found = len(await agents.open_reservations(broker))
    return "" if found == count else f"{found} of {count} have been heard all the same"


async def open_connections(agent):
    """Calls at one moment leave as many idle connections. Through a slow line no new one opens in time."""
    names = [f"early-{number}" for number in range(CONNECTIONS)]
    for name in names:
        await agent.create_request(name)
    for name in names:
        await agent.becomes(name, "Active")
    await agent.delete_all_requests()
    for name in names:
        await agent.wait_deleted(name)


@pytest.mark.parametrize("way", ["up", "down"])
async def test_what_arrives_too_late_takes_nothing_twice(scene, behind, way):
    """Questions, or answers, arrive when nobody waits for them any more."""
    lender = await scene.start("lender", scene.broker.port)
    line, agent = await behind("r")
    await open_connections(agent)
    line.slow(**{way: LATE})
    await agent.create_request("kept")
    await agent.create_request("dropped")
    await agent.shows("kept", is_unheard)
    await agent.shows("dropped", is_unheard)
    await until_resolved(lambda: untaken(scene.broker, 2))
    taken = await agents.open_reservations(scene.broker)
    await agent.delete_request("dropped")
    line.mend()
    found = await agent.becomes("kept", "Active")
    await agent.wait_deleted("dropped")
    assert found.status.reservation_name in taken
    assert len(await agents.until_agreed(scene.broker, lender, agent)) == 1
    await agents.until_over(scene.broker, lender, agent)
