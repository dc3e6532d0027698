"""Several endless streams as one: what comes first is handed on first.

`kubernetes.KubernetesSource` hears of nodes and of pods by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

Event = TypeVar("Event")


async def merged(*streams: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Each has one event waiting at most: who is slow to take them slows the streams down.

    Ends with the first that ends or fails. All are closed when this is.
    """
    waiting = {_next(stream): stream for stream in streams}
    try:
        while True:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                for event in task.result():
                    waiting[_next(stream)] = stream
                    yield event
            if len(waiting) < len(streams):
                return
    finally:
        await _close(waiting, streams)


def _next(stream: AsyncGenerator[Event, None]) -> asyncio.Task[list[Event]]:
    async def take() -> list[Event]:
        """None at its end: a task cannot raise what says so."""
        async for event in stream:
            return [event]
        return []

    return asyncio.create_task(take(), name="next event")


async def _close(
    waiting: dict[asyncio.Task[list[Event]], AsyncGenerator[Event, None]],
    streams: tuple[AsyncGenerator[Event, None], ...],
) -> None:
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting)
    for task in waiting:
        if not task.cancelled():
            task.exception()  # or it would be called unseen
    for stream in streams:
        await stream.aclose()
