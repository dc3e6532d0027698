"""The lock of a provider: who is next, how long a waiter waits, and that it is never lost."""

import asyncio
import time
from datetime import timedelta

import pytest

from kubelend.core.errors import Unavailable
from kubelend.peerings import liqoctl
from kubelend.peerings.liqoctl import ProviderLocks
from waiting import PATIENCE

LIMIT = timedelta(seconds=10)


@pytest.fixture
def locks():
    return ProviderLocks(LIMIT, time.monotonic)


class Holders:
    """Tasks that record when they hold the lock, and release it at `end`."""

    def __init__(self, locks):
        self.locks = locks
        self.held = []
        self.gates = {}
        self.tasks = {}

    async def start(self, name, *, is_urgent=False):
        self.gates[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._work(name, is_urgent))
        await settled()

    async def _work(self, name, is_urgent):
        async with self.locks.acquire("one", is_urgent=is_urgent):
            self.held.append(name)
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
async def holders(locks):
    holders = Holders(locks)
    yield holders
    await holders.end_all()


async def test_lock_is_held_by_one_at_a_time_and_urgent_waiters_wait_for_the_holder_only(holders):
    for name in "abc":
        await holders.start(name)
    assert holders.held == ["a"]
    await holders.start("urgent", is_urgent=True)
    await holders.start("urgent too", is_urgent=True)
    await holders.end("a")
    assert holders.held == ["a", "urgent"]
    await holders.end_all()
    assert holders.held == ["a", "urgent", "urgent too", "b", "c"]


@pytest.mark.parametrize("is_urgent", [False, True], ids=["waiting", "urgent"])
async def test_cancelled_waiter_is_skipped(holders, is_urgent):
    await holders.start("a")
    await holders.start("b", is_urgent=is_urgent)
    await holders.start("c")
    await holders.cancel("b")
    await holders.end("a")
    assert holders.held == ["a", "c"]


@pytest.mark.parametrize("has_lock", [False, True])
async def test_waiter_cancelled_while_the_lock_is_released_passes_it_on(holders, has_lock):
    for name in "abc":
        await holders.start(name)
    holders.gates["a"].set()
    if has_lock:
        await asyncio.sleep(0)  # it has the lock, and does not know it yet
    holders.tasks["b"].cancel()
    await settled()
    assert holders.held == ["a", "c"]


async def test_waiter_times_out_after_the_limit(monkeypatch):
    monkeypatch.setattr(liqoctl, "LOCK_SLACK", timedelta())
    locks = ProviderLocks(timedelta(milliseconds=20), time.monotonic)
    async with asyncio.timeout(PATIENCE), locks.acquire("one"):
        for is_urgent in (False, True):
            with pytest.raises(
                Unavailable, match="another peering command for one is still running"
            ) as late:
                async with locks.acquire("one", is_urgent=is_urgent):
                    pytest.fail("it got the lock")
            assert late.value.retryable
    async with asyncio.timeout(PATIENCE), locks.acquire("one") as budget:
        assert budget.remaining(LIMIT) > timedelta(), "who gave up is skipped"
