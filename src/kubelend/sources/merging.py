"""Merges endless streams into one, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

Event = TypeVar("Event")


async def merge_streams(*streams: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Buffers at most one event per stream: a slow consumer slows the streams down.

    Ends with the first stream that ends or fails. All are closed with this one.
    """
    waiting = {_next_event(stream): stream for stream in streams}
    try:
        while True:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                for event in task.result():
                    waiting[_next_event(stream)] = stream
                    yield event
            if len(waiting) < len(streams):
                return
    finally:
        await _close_streams(waiting, streams)


def _next_event(stream: AsyncGenerator[Event, None]) -> asyncio.Task[list[Event]]:
    async def take() -> list[Event]:
        """Empty at the end of the stream: a task cannot raise StopAsyncIteration."""
        async for event in stream:
            return [event]
        return []

    return asyncio.create_task(take(), name="next event")


async def _close_streams(
    waiting: dict[asyncio.Task[list[Event]], AsyncGenerator[Event, None]],
    streams: tuple[AsyncGenerator[Event, None], ...],
) -> None:
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting)
    for task in waiting:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
    for stream in streams:
        await stream.aclose()
