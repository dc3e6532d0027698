"""What comes often is done together; what comes alone is not kept waiting."""

import asyncio
from functools import partial

from kubelend.kits.ratelimit import CoalescingTimer
from waiting import PATIENCE

HOUR = 3600.0


async def test_what_comes_alone_is_done_at_once():
    done: list[str] = []
    CoalescingTimer(HOUR).schedule(partial(done.append, "a"))
    assert done == ["a"]


async def test_what_comes_soon_after_waits_for_the_beat_with_the_others():
    done: list[str] = []
    over = asyncio.Event()
    rhythm = CoalescingTimer(0.05)
    for name in "abcd":
        rhythm.schedule(partial(done.append, name))
    rhythm.schedule(over.set)
    assert done == ["a"]
    await asyncio.wait_for(over.wait(), PATIENCE)
    assert done == ["a", "b", "c", "d"]


async def test_one_that_fails_takes_nobody_along():
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    over = asyncio.Event()
    rhythm = CoalescingTimer(0.05)
    rhythm.schedule(lambda: None)
    rhythm.schedule(partial([].pop, 0))
    rhythm.schedule(over.set)
    await asyncio.wait_for(over.wait(), PATIENCE)


async def test_after_a_beat_the_next_ones_wait_for_another():
    rhythm = CoalescingTimer(0.05)
    for _ in range(3):
        over = asyncio.Event()
        rhythm.schedule(lambda: None)
        rhythm.schedule(over.set)
        await asyncio.wait_for(over.wait(), PATIENCE)


async def test_without_seconds_nothing_waits():
    done: list[str] = []
    rhythm = CoalescingTimer(0.0)
    for name in "abc":
        rhythm.schedule(partial(done.append, name))
    assert done == ["a", "b", "c"]
