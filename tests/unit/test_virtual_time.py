"""Virtual time passes in its order and at once, waits for threads, and does not hang."""

import asyncio
import time

import pytest

import make
from virtual_time import in_virtual_time, now, settled, stopped


@in_virtual_time
async def test_timers_go_off_in_their_order_at_their_time():
    gone = []

    async def nap(hours):
        await asyncio.sleep(hours * 3600)
        gone.append((hours, now()))

    await asyncio.gather(nap(48), nap(1), nap(2))
    assert gone == [(hours, make.T0 + hours * make.HOUR) for hours in (1, 2, 48)]


@in_virtual_time
async def test_no_time_passes_while_something_is_to_do():
    await settled()
    assert now() == make.T0


@in_virtual_time
async def test_threads_are_waited_for():
    async with asyncio.timeout(0.001):
        await asyncio.to_thread(time.sleep, 0.02)
    assert now() == make.T0


@in_virtual_time
async def test_what_a_task_failed_with_is_raised_when_it_is_stopped():
    async def fail():
        raise ValueError("broken")

    tasks = asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(1))
    await settled()
    with pytest.raises(ValueError, match="broken"):
        await stopped(*tasks)


def test_waiting_for_ever_fails():
    @in_virtual_time
    async def wait():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="cannot happen"):
        wait()


def test_a_task_left_behind_fails():
    @in_virtual_time
    async def leave(kept):
        kept.append(asyncio.create_task(asyncio.sleep(1)))

    with pytest.raises(AssertionError, match="left pending"):
        leave([])
