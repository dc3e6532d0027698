"""Long work side by side: who hangs keeps no other waiting, and who fails is tried again."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from kubelend.agent.controller import RetryQueue
from kubelend.core.errors import Unavailable
from virtual_time import in_virtual_time, settled, stopped


class Work:
    """Looks at keys: `slow` ones take an hour, `bad` ones fail, and `wrong` ones are a mistake."""

    def __init__(self):
        self.looked: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.crew = RetryQueue(self.look, self.fail)

    async def look(self, key):
        self.looked[key] += 1
        if key.startswith("slow"):
            await asyncio.sleep(3600)
        if key.startswith("bad"):
            raise Unavailable("not now")
        if key.startswith("wrong"):
            raise ZeroDivisionError(key)
        self.crew.forget(key)

    async def fail(self, key, error):
        assert str(error) == "not now"
        self.failed[key] += 1


@asynccontextmanager
async def working():
    work = Work()
    task = asyncio.create_task(work.crew.run())
    try:
        yield work
    finally:
        await stopped(task)


@in_virtual_time
async def test_a_hundred_that_hang_keep_no_other_waiting():
    async with working() as work:
        for number in range(100):
            work.crew.add(f"slow {number}")
        work.crew.add("quick")
        await settled()
        assert work.looked["quick"] == 1
        assert work.looked.total() == 101


@in_virtual_time
async def test_one_key_is_looked_at_by_one_worker_at_a_time():
    async with working() as work:
        for _ in range(5):
            work.crew.add("slow")
            await settled()
        assert work.looked["slow"] == 1
        await asyncio.sleep(3601)
        assert work.looked["slow"] == 2


@in_virtual_time
async def test_what_fails_is_tried_again_with_growing_pauses_and_told_each_time():
    async with working() as work:
        work.crew.add("bad")
        await asyncio.sleep(60)
        assert 6 <= work.looked["bad"] <= 10
        assert work.failed["bad"] == work.looked["bad"]


@in_virtual_time
async def test_a_hurry_does_not_wait_for_the_next_try():
    async with working() as work:
        work.crew.add("bad")
        await asyncio.sleep(600)
        before = work.looked["bad"]
        work.crew.retry_now()
        await settled()
        assert work.looked["bad"] == before + 1


@in_virtual_time
async def test_a_mistake_ends_all_with_its_own_reason():
    work = Work()
    work.crew.add("slow")
    work.crew.add("wrong")
    with pytest.raises(ZeroDivisionError, match="wrong"):
        await work.crew.run()
