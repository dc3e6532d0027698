"""One at a time: who comes next, for how long anybody waits, and that no turn is ever lost."""

import asyncio
import time
from contextlib import suppress
from datetime import timedelta

import pytest

from kubelend.core.errors import Unavailable
from kubelend.peerings import liqoctl
from kubelend.peerings.liqoctl import ProviderLocks, TimeBudget
from waiting import PATIENCE

LIMIT = timedelta(seconds=10)


@pytest.fixture
def order():
    return ProviderLocks(LIMIT, time.monotonic)


class Crowd:
    """Tasks that note when it is their turn, and end it when they are told to."""

    def __init__(self, order):
        self.order = order
        self.seen = []
        self.gates = {}
        self.tasks = {}

    async def come(self, name, *, is_urgent=False, cluster="one"):
        self.gates[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._work(name, cluster, is_urgent))
        await settled()

    async def _work(self, name, cluster, is_urgent):
        async with self.order.acquire(cluster, is_urgent=is_urgent):
            self.seen.append(name)
            await self.gates[name].wait()

    async def end(self, name):
        self.gates[name].set()
        await settled()

    async def cancel(self, name):
        self.tasks[name].cancel()
        await settled()

    async def end_all(self):
        for gate in self.gates.values():
            gate.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def crowd(order):
    crowd = Crowd(order)
    yield crowd
    await crowd.end_all()


async def test_turns_come_one_at_a_time_in_their_order(crowd):
    for name in "abc":
        await crowd.come(name)
    assert crowd.seen == ["a"]
    await crowd.end("a")
    assert crowd.seen == ["a", "b"]
    await crowd.end_all()
    assert crowd.seen == ["a", "b", "c"]


async def test_other_providers_have_turns_of_their_own(crowd):
    await crowd.come("a")
    await crowd.come("b", cluster="two")
    assert crowd.seen == ["a", "b"]


async def test_urgent_one_waits_for_the_present_one_alone(crowd):
    for name in "abc":
        await crowd.come(name)
    await crowd.come("urgent", is_urgent=True)
    await crowd.come("urgent too", is_urgent=True)
    await crowd.end("a")
    assert crowd.seen == ["a", "urgent"]
    await crowd.end_all()
    assert crowd.seen == ["a", "urgent", "urgent too", "b", "c"]


@pytest.mark.parametrize("is_urgent", [False, True], ids=["waiting", "urgent"])
async def test_who_is_cancelled_while_waiting_is_passed_over(crowd, is_urgent):
    await crowd.come("a")
    await crowd.come("b", is_urgent=is_urgent)
    await crowd.come("c")
    await crowd.cancel("b")
    await crowd.end("a")
    assert crowd.seen == ["a", "c"]


async def test_who_is_cancelled_in_the_moment_of_its_turn_passes_it_on(crowd):
    for name in "abc":
        await crowd.come(name)
    crowd.gates["a"].set()
    await asyncio.sleep(0)
    crowd.tasks["b"].cancel()  # called, and not awake yet
    await settled()
    assert crowd.seen == ["a", "c"]


async def test_who_is_called_in_the_moment_it_is_cancelled_is_passed_over(crowd):
    for name in "abc":
        await crowd.come(name)
    crowd.tasks["b"].cancel()
    crowd.gates["a"].set()
    await settled()
    assert crowd.seen == ["a", "c"]


async def test_turn_that_fails_is_over(order):
    with suppress(ValueError):
        async with order.acquire("one"):
            raise ValueError
    async with asyncio.timeout(PATIENCE), order.acquire("one") as turn:
        assert isinstance(turn, TimeBudget)


async def test_nobody_waits_longer_than_a_turn_may_take(monkeypatch):
    monkeypatch.setattr(liqoctl, "LOCK_SLACK", timedelta())
    order = ProviderLocks(timedelta(milliseconds=20), time.monotonic)
    async with asyncio.timeout(PATIENCE), order.acquire("one"):
        for is_urgent in (False, True):
            with pytest.raises(
                Unavailable, match="another peering command for one is still running"
            ) as late:
                async with order.acquire("one", is_urgent=is_urgent):
                    pytest.fail("it is not its turn")
            assert late.value.retryable
    async with asyncio.timeout(PATIENCE), order.acquire("one") as turn:
        assert turn.remaining(LIMIT) > timedelta(), "who gave up is passed over"


def test_time_of_a_turn_is_shared_by_what_is_done_in_it():
    now = 5.0
    turn = TimeBudget("one", LIMIT, lambda: now)
    assert turn.remaining(LIMIT) == LIMIT
    now += 8
    assert turn.remaining(LIMIT) == timedelta(seconds=2)
    assert turn.remaining(timedelta(seconds=1)) == timedelta(seconds=1)
    now += 2
    with pytest.raises(Unavailable, match="peering commands for one exceeded 10s"):
        turn.remaining(LIMIT)
