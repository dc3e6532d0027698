"""The broker dies by `kill -9` in the middle of everything, again and again, and the agents go on."""

import asyncio
import contextlib
import itertools
import random
import signal

import pytest

import agents
import brokers
from kubelend.wire.objects import ResourceRequest

ROUNDS = 4
NAMES = ("a", "b", "c")
MOST = 8
"""Requests that one cluster has at a time."""


class Users:
    """Of one cluster: they make requests and delete them, wherever those are, until told to stop."""

    def __init__(self, agent, dice):
        self.made = 0
        self._agent = agent
        self._dice = dice
        self._numbers = itertools.count(1)

    async def run(self):
        while True:
            there = await self._agent.objects.list(ResourceRequest)
            if len(there) < MOST and self._dice.random() < 0.6:
                self.made += 1
                await self._agent.wish(f"w{next(self._numbers)}", cpu="100m", memory="64Mi")
            elif there:
                await self._agent.unwish(self._dice.choice(there).metadata.name)
            await asyncio.sleep(self._dice.uniform(0, 0.05))


@contextlib.asynccontextmanager
async def busy(members, dice):
    users = [Users(agent, dice) for agent in members]
    working = [asyncio.create_task(one.run()) for one in users]
    try:
        yield users
    finally:
        for task in working:
            task.cancel()
        await asyncio.wait(working)


@pytest.mark.timeout(120)
async def test_broker_that_is_killed_again_and_again_takes_nothing_twice(certificates, tmp_path):
    dice, port = random.Random(), "0"
    async with contextlib.AsyncExitStack() as stack:
        start = await stack.enter_async_context(agents.starting(certificates, tmp_path))
        members = []
        for number in range(ROUNDS):
            async with brokers.child(certificates, tmp_path, http_port=port) as broker:
                port = str(broker.port)
                if not members:
                    members = [await start(name, broker.port) for name in NAMES]
                    users = await stack.enter_async_context(busy(members, dice))
                await until_more_are_made(users)
                if number < ROUNDS - 1:
                    await asyncio.sleep(dice.uniform(0, 0.3))
                    assert await broker.stop(signal.SIGKILL) == -signal.SIGKILL
                    continue
                users = await stack.enter_async_context(contextlib.AsyncExitStack())
