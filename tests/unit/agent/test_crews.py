"""Long work side by side: who hangs keeps no other waiting, and who fails is tried again."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from kubelend.agent.controller import RetryQueue
from kubelend.core.errors import Unavailable
from virtual_time import in_virtual_time, settled, stopped


class Work:
    """Reconciles keys: `slow` ones take an hour, `bad` ones fail, and `wrong` ones are a mistake."""

    def __init__(self):
        self.reconciled: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.queue = RetryQueue(self.reconcile, self.fail)

    async def reconcile(self, key):
        self.reconciled[key] += 1
        if key.startswith("slow"):
            await asyncio.sleep(3600)
        if key.startswith("bad"):
            raise Unavailable("not now")
        if key.startswith("wrong"):
            raise ZeroDivisionError(key)
        self.queue.forget(key)

    async def fail(self, key, error):
        assert str(error) == "not now"
        self.failed[key] += 1


@asynccontextmanager
async def working():
    work = Work()
    task = asyncio.create_task(work.queue.run())
    try:
        yield work
    finally:
        await stopped(task)


@in_virtual_time
async def test_a_hundred_that_hang_keep_no_other_waiting():
    async with working() as work:
        for number in range(100):
            work.queue.add(f"slow {number}")
        work.queue.add("quick")
        await settled()
        assert work.reconciled["quick"] == 1
        assert work.reconciled.total() == 101


@in_virtual_time
async def test_one_key_is_looked_at_by_one_worker_at_a_time():
    async with working() as work:
        for _ in range(5):
            work.queue.add("slow")
            await settled()
        assert work.reconciled["slow"] == 1
        await asyncio.sleep(3601)
        assert work.reconciled["slow"] == 2


@in_virtual_time
async def test_what_fails_is_tried_again_with_growing_pauses_and_told_each_time():
    async with working() as work:
        work.queue.add("bad")
        await asyncio.sleep(60)
        assert 6 <= work.reconciled["bad"] <= 10
        assert work.failed["bad"] == work.reconciled["bad"]


@in_virtual_time
async def test_a_hurry_does_not_wait_for_the_next_try():
    async with working() as work:
        work.queue.add("bad")
        await asyncio.sleep(600)
        before = work.reconciled["bad"]
        work.queue.retry_now()
        await settled()
        assert work.reconciled["bad"] == before + 1


@in_virtual_time
async def test_a_mistake_ends_all_with_its_own_reason():
    work = Work()
    work.queue.add("slow")
    work.queue.add("wrong")
    with pytest.raises(ZeroDivisionError, match="wrong"):
        await work.queue.run()
