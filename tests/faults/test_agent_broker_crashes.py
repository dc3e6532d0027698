"""A broker that is killed again and again, or restored from a backup: agents continue, and follow it."""

import asyncio
import contextlib
import random
import shutil
import signal

import pytest

import agents
import brokers
from kubelend.wire.objects import ResourceRequest
from waiting import until_resolved

pytestmark = pytest.mark.filterwarnings(agents.LEFT_SOCKETS)

KILLS = 3
NAMES = ("a", "b", "c")
MAX_REQUESTS = 8
"""Requests that one cluster has at a time."""


class Users:
    """Users of one cluster, who create requests and delete them in any phase."""

    def __init__(self, agent):
        self.agent = agent
        self.made = 0
        self._dice = random.Random()

    async def work(self):
        while True:
            there = await self.agent.objects.list(ResourceRequest)
            if len(there) < MAX_REQUESTS and self._dice.random() < 0.6:
                self.made += 1
                await self.agent.create_request(f"w{self.made}", cpu="100m", memory="64Mi")
            elif there:
                await self.agent.delete_request(self._dice.choice(there).metadata.name)
            await asyncio.sleep(self._dice.uniform(0, 0.05))

    async def get_reservation(self):
        """Waits until a request that is created from now on has a reservation."""
        before = self.made

        async def look():
            for found in await self.agent.objects.list(ResourceRequest):
                is_new = int(found.metadata.name[1:]) > before
                if is_new and found.status.phase in ("Reserved", "Active"):
                    return ""
            return f"{self.agent.name} has no reservation: {self.agent.problems}"

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
            group.create_task(one.get_reservation())
    await asyncio.sleep(random.uniform(0, 0.2))
    assert await broker.stop(signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.timeout(120)
async def test_killed_broker_reserves_nothing_twice(certificates, tmp_path):
    async with agents.starting(certificates, tmp_path) as start:
        async with brokers.child(certificates, tmp_path) as broker:
            members = [await start(name, broker.port) for name in NAMES]
        # It is restarted on the same port.
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


RENEWALS = 200
"""More than there are changes of anything else: revisions must not catch up by themselves."""


@pytest.mark.timeout(120)
async def test_agents_follow_a_broker_that_was_restored_from_a_backup(certificates, tmp_path):
    store, backup = tmp_path / "kubelend.db", tmp_path / "backup.db"
    async with agents.starting(certificates, tmp_path) as start:
        async with brokers.child(certificates, tmp_path) as broker:
            members = [await start(name, broker.port) for name in ("a", "b")]
            borrower, port = members[0], str(broker.port)
            await borrower.create_request("kept")
            await borrower.becomes("kept", "Active")
            (reservation,) = await agents.until_agreed(broker, *members)
            assert await broker.stop() == 0
        shutil.copy(store, backup)
        async with brokers.child(certificates, tmp_path, http_port=port) as broker:
            for minutes in range(100, 100 + RENEWALS):
                longer = {"duration": f"{minutes}m"}
                answer = await broker.cluster("a").post(
                    "reservations", reservation, "renew", longer
                )
                assert answer.status == 200
            await agents.until_agreed(broker, *members)
            assert await broker.stop() == 0
        for left in tmp_path.glob("kubelend.db*"):
            left.unlink()
        shutil.copy(backup, store)
        async with brokers.child(certificates, tmp_path, http_port=port) as broker:
            assert list(await agents.until_agreed(broker, *members)) == [reservation]
            await agents.until_over(broker, *members)
            await borrower.create_request("new")
            await borrower.becomes("new", "Active")
            assert await broker.stop() == 0
    brokers.audited(store)
