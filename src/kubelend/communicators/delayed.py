"""A slow network for simulated clusters: every call and every instruction is delayed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta

from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.wrapping import Answer, Wrapped
from kubelend.wire import bodies

RESET = None


class Delayed(Wrapped):
    """Waits before each call, and yields each instruction the same time after it was sent."""

    def __init__(self, inner: BrokerCommunicator, delay: timedelta) -> None:
        super().__init__(inner)
        self._seconds = delay.total_seconds()
        self._on_the_way: deque[tuple[float, bodies.Instruction | None]] = deque()
        """Each with its arrival time. What one stream has not yielded comes with the next."""
        self._news = asyncio.Event()

    async def around(self, _: str, call: Callable[[], Awaitable[Answer]], /) -> Answer:
        await asyncio.sleep(self._seconds)
        return await call()

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        sending = asyncio.create_task(self._send())
        sending.add_done_callback(lambda _: self._news.set())
        try:
            while await self._is_more(sending):
                arrives_at, instruction = self._on_the_way[0]
                await asyncio.sleep(arrives_at - asyncio.get_running_loop().time())
                self._on_the_way.popleft()
                if instruction is RESET:
                    on_reset()
                else:
                    yield instruction
            await sending  # raises the error by which it ended
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self) -> None:
        """Reads ahead, so that instructions sent at the same time arrive at the same time."""
        async with aclosing(self._inner.stream(lambda: self._put(RESET))) as instructions:
            async for instruction in instructions:
                self._put(instruction)

    def _put(self, item: bodies.Instruction | None) -> None:
        self._on_the_way.append((asyncio.get_running_loop().time() + self._seconds, item))
        self._news.set()

    async def _is_more(self, sending: asyncio.Task[None]) -> bool:
        while not self._on_the_way and not sending.done():
            self._news.clear()
            await self._news.wait()
        return bool(self._on_the_way)
