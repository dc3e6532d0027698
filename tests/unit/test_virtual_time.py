"""Virtual time waits for threads, and neither hangs nor leaves tasks behind."""

import asyncio
import time

import pytest

import make
from virtual_time import in_virtual_time, now


@in_virtual_time
async def test_threads_are_waited_for():
    async with asyncio.timeout(0.001):
        await asyncio.to_thread(time.sleep, 0.02)
    assert now() == make.T0


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
