"""Answers that come twice, out of order, or long after newer ones: they change nothing."""

import asyncio
import random
from contextlib import aclosing, suppress

import pytest
from msgspec.structs import replace

import agents
from kubelend.communicators.middleware import Middleware
from kubelend.core.errors import KubelendError
from kubelend.wire import bodies
from waiting import until_resolved

NAMES = ("a", "b", "c")
ROUNDS = 12
MEMORY = 200
"""So many old words are said again and again."""


class Disorderly(Middleware):
    """A way to the broker on which all that it says of reservations comes again, and in another order."""

    def __init__(self, inner, dice):
        super().__init__(inner)
        self.repeated = 0
        self._dice = dice
        self._said = []
        self._instructions = []

    async def wrap_call(self, name, call):
        return await call()

    async def publish(self, advertisement):
        answer = await self._inner.publish(advertisement)
        return replace(answer, provider_instructions=self._disorder(answer.provider_instructions))

    async def instructions(self):
        return self._disorder(await self._inner.instructions())

    async def stream(self, on_reset):
        """What has come within a moment, with some of what came before."""
        news: asyncio.Queue[bodies.Instruction | KubelendError] = asyncio.Queue()
        reading = asyncio.create_task(self._read(on_reset, news))
        try:
            while True:
                batch = [await news.get()]
                await asyncio.sleep(self._dice.uniform(0, 0.03))
                while not news.empty():
                    batch.append(news.get_nowait())
                for one in self._mixed(batch, self._instructions):
                    if isinstance(one, KubelendError):
                        raise one
                    yield one
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _read(self, on_reset, news):
        try:
            async with aclosing(self._inner.stream(on_reset)) as instructions:
                async for instruction in instructions:
                    self._said.append(instruction.reservation)
                    news.put_nowait(instruction)
        except KubelendError as error:
            news.put_nowait(error)

    def _disorder(self, listed):
        return self._mixed(listed, self._said)

    def _mixed(self, news, before):
        old = self._dice.sample(before, min(len(before), 5))
        self.repeated += len(old)
        before += [one for one in news if not isinstance(one, KubelendError)]
        del before[:-MEMORY]
        mixed = [*news, *news, *old]
        self._dice.shuffle(mixed)
        return mixed


@pytest.mark.parametrize("seed", range(2))
async def test_duplicates_and_old_words_in_any_order_change_nothing(certificates, tmp_path, seed):
    dice, ways = random.Random(seed), []

    def disorderly(inner):
        ways.append(Disorderly(inner, dice))
        return ways[-1]

    def disturb(agent):
        agent.wrap = disorderly

    async with agents.scene(certificates, tmp_path) as (broker, start, _):
        members = [await start(name, broker.port, prepare=disturb) for name in NAMES]
        for number in range(ROUNDS):
            for agent in members:
                await agent.create_request(f"w{number}", cpu="100m", memory="64Mi")
            for agent in members if number % 3 else ():
                await agent.becomes(f"w{number}", "Active")
            for agent in members if number % 2 else ():
                await agent.delete_request(f"w{number}")
        for agent in members:
            await agent.becomes(f"w{ROUNDS - 2}", "Active")
            await agent.wait_deleted(f"w{ROUNDS - 1}")
        left = await agents.until_agreed(broker, *members)
        assert len(left) == ROUNDS // 2 * len(members)
        await agents.until_over(broker, *members)
        assert all(way.repeated > ROUNDS for way in ways)
        # Another while of old words, after all is over.
        repeated = [way.repeated for way in ways]
        await until_resolved(lambda: all_repeat(ways, repeated))
        assert await agents.until_agreed(broker, *members) == {}


async def all_repeat(ways, before):
    many = [way.repeated - then for way, then in zip(ways, before, strict=True)]
    return "" if min(many) > 5 else f"repeated {many}"
