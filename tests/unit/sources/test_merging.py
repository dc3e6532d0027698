"""Several streams as one: in the order in which things come, and none is left open."""

import asyncio
from contextlib import aclosing

import pytest

from kubelend.core.errors import Unavailable
from kubelend.sources.kubernetes import merge_streams


class Stream:
    """Says what it is given, until it is given an error or the end."""

    END = object()

    def __init__(self):
        self.events: asyncio.Queue[object] = asyncio.Queue()
        self.is_closed = False

    async def __call__(self):
        try:
            while (event := await self.events.get()) is not self.END:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.is_closed = True


@pytest.fixture
def streams():
    return Stream(), Stream()


async def test_what_comes_first_is_told_first(streams):
    one, two = streams
    async with aclosing(merge_streams(one(), two())) as events:
        for stream, event in [(two, "a"), (two, "b"), (one, "c"), (two, "d")]:
            stream.events.put_nowait(event)
            assert await anext(events) == event
    assert one.is_closed
    assert two.is_closed


async def test_nothing_is_lost_when_all_come_at_once(streams):
    one, two = streams
    for number in range(10):
        one.events.put_nowait(("one", number))
        two.events.put_nowait(("two", number))
    async with aclosing(merge_streams(one(), two())) as events:
        told = [await anext(events) for _ in range(20)]
    for name in ("one", "two"):
        assert [event for event in told if event[0] == name] == [(name, n) for n in range(10)]


async def test_slow_listener_slows_the_streams_down(streams):
    one, two = streams
    for number in range(10):
        one.events.put_nowait(number)
    async with aclosing(merge_streams(one(), two())) as events:
        assert await anext(events) == 0
        await asyncio.sleep(0)
        assert one.events.qsize() >= 8


async def test_failure_of_one_ends_all(streams):
    one, two = streams
    one.events.put_nowait(Unavailable("away"))
    with pytest.raises(Unavailable):
        async with aclosing(merge_streams(one(), two())) as events:
            await anext(events)
    assert two.is_closed


async def test_end_of_one_ends_all(streams):
    one, two = streams
    one.events.put_nowait(Stream.END)
    assert [event async for event in merge_streams(one(), two())] == []
    assert two.is_closed


async def test_cancelled_listener_leaves_nothing_open(streams):
    one, two = streams

    async def listen():
        async with aclosing(merge_streams(one(), two())) as events:
            await anext(events)

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not one.events.qsize()
