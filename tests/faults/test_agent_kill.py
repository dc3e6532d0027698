"""Agents as processes that die by `kill -9`, with objects in files: each life goes on where one ended."""

import asyncio
import contextlib
import random
import signal
from collections import Counter

import pytest

import agent_process
import agents
import brokers
from kubelend.kits import clock
from kubelend.sources.file_objects import FileObjects

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings(agents.LEFT_SOCKETS)]

AT_A_TIME = 3
QUICKLY = 9.0
"""Seconds until another one has taken over."""


@pytest.fixture
async def broker(certificates, tmp_path):
    async with brokers.child(certificates, tmp_path) as broker:
        yield broker
        assert await broker.stop() == 0
    brokers.audited(tmp_path / "kubelend.db")


@pytest.fixture
async def cluster(tmp_path):
    """What the users of a cluster see, whoever serves them."""
    async with contextlib.AsyncExitStack() as stack:

        def cluster(name):
            objects = FileObjects(tmp_path / name / "objects", clock.utc_now)
            stack.push_async_callback(objects.close)
            return agents.Cluster(name, objects)

        yield cluster


@pytest.fixture
def start(broker, certificates, tmp_path):
    with contextlib.ExitStack() as stack:

        async def start(name, directory=""):
            url, own = f"https://localhost:{broker.port}", tmp_path / (directory or name)
            return stack.enter_context(agent_process.running(url, certificates.cluster(name), own))

        yield start


async def ready(agent):
    await asyncio.to_thread(agent.wait_until_ready)


async def killed_soon(agent):
    """Somewhere in the half second in which it has most to do."""
    await asyncio.sleep(random.uniform(0.0, 0.5))
    assert await asyncio.to_thread(agent.end, signal.SIGKILL) == -signal.SIGKILL


async def test_whoever_is_killed_there_is_one_lock_for_each_request(broker, start, cluster):
    running = {name: await start(name) for name in ("borrower", "lender")}
    for agent in running.values():
        await ready(agent)
    borrower, lender = cluster("borrower"), cluster("lender")
    for victim in ("borrower", "lender"):
        for number in range(AT_A_TIME):
            await borrower.create_request(
                f"w{number}-{victim}", cpu="100m", target_cluster_id="lender"
            )
            if victim == "lender":
                await borrower.delete_request(f"w{number}-borrower")
        await killed_soon(running[victim])
        running[victim] = await start(victim)
        await ready(running[victim])
    for number in range(AT_A_TIME):
        await borrower.becomes(f"w{number}-lender", "Active")
        await borrower.wait_deleted(f"w{number}-borrower")
    assert len(await agents.until_agreed(broker, borrower, lender)) == AT_A_TIME
    await agents.until_over(broker, borrower, lender)


async def test_second_process_of_one_name_says_why_it_waits_and_takes_over_from_the_dead(
    broker, start, cluster
):
    one, lender = await start("one"), await start("lender")
    await ready(one)
    await ready(lender)
    two = await start("one", directory="two")
    await asyncio.to_thread(two.wait_for, lambda: says_why(two))
    assert two.get("/healthz") == (200, "ok")
    unhealthy = [line for line in two.log() if "component" in line and "error" in line]
    assert Counter(line["component"] for line in unhealthy) == {"publisher": 1, "stream": 1}
    for line in unhealthy:
        assert "another agent is active for one since" in line["error"]
    assert one.get("/readyz")[0] == 200
    assert await asyncio.to_thread(one.end, signal.SIGKILL) == -signal.SIGKILL
    await asyncio.to_thread(two.wait_for, lambda: two.get("/readyz")[0] == 200, QUICKLY)
    users = cluster("two")
    await users.create_request("w")
    await users.becomes("w", "Active")
    assert await asyncio.to_thread(two.end) == 0


def says_why(agent):
    status, text = agent.get("/readyz")
    return status == 503 and text.count("another agent is active for one since") == 2
