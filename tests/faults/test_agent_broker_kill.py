"""The broker dies by `kill -9` in the middle of everything, again and again, and the agents go on."""

import asyncio
import contextlib
import random
import signal

import pytest

import agents
import brokers
from kubelend.wire.objects import ResourceRequest
from waiting import until_resolved

pytestmark = pytest.mark.filterwarnings(agents.LEFT_SOCKETS)

KILLS = 3
NAMES = ("a", "b", "c")
MOST = 8
"""Requests that one cluster has at a time."""


class Users:
    """Of one cluster: they make requests and delete them, however far those are."""

    def __init__(self, agent):
        self.agent = agent
        self.made = 0
        self._dice = random.Random()

    async def work(self):
        while True:
            there = await self.agent.objects.list(ResourceRequest)
            if len(there) < MOST and self._dice.random() < 0.6:
                self.made += 1
                await self.agent.create_request(f"w{self.made}", cpu="100m", memory="64Mi")
            elif there:
                await self.agent.delete_request(self._dice.choice(there).metadata.name)
            await asyncio.sleep(self._dice.uniform(0, 0.05))

    async def get_something(self):
        """Wait until one gets what it asks for from now on."""
        before = self.made

        async def look():
            for found in await self.agent.objects.list(ResourceRequest):
                is_new = int(found.metadata.name[1:]) > before
                if is_new and found.status.phase in ("Reserved", "Active"):
                    return ""
            return f"{self.agent.name} has got nothing: {self.agent.problems}"

        await until_resolved(look)


@contextlib.asynccontextmanager
async def busy(users):
    working = [asyncio.create_task(one.work()) for one in users]
    try:
        yield
    finally:
        for task in working:
            task.cancel()
        await asyncio.wait(working)


async def killed_in_the_middle(broker, users):
    async with asyncio.TaskGroup() as group:
        for one in users:
            group.create_task(one.get_something())
    await asyncio.sleep(random.uniform(0, 0.2))
    assert await broker.stop(signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.timeout(120)
async def test_broker_that_is_killed_again_and_again_takes_nothing_twice(certificates, tmp_path):
    async with agents.starting(certificates, tmp_path) as start:
        async with brokers.child(certificates, tmp_path) as broker:
            members = [await start(name, broker.port) for name in NAMES]
        # They look for it at the same place from now on.
        users, port = [Users(agent) for agent in members], str(broker.port)
        async with busy(users):
            for _ in range(KILLS):
                async with brokers.child(certificates, tmp_path, http_port=port) as broker:
                    await killed_in_the_middle(broker, users)
        for agent in members:
            await agent.create_request("last")
        async with brokers.child(certificates, tmp_path, http_port=port) as broker:
            for agent in members:
                await agent.becomes("last", "Active")
            assert len(await agents.until_agreed(broker, *members)) >= len(members)
            await agents.until_over(broker, *members)
            assert await broker.stop() == 0
    ledger = brokers.audited(tmp_path / "kubelend.db")
    assert len(ledger.reservations) > KILLS * len(NAMES)
