"""A slow network for simulated clusters: every call and every instruction is delayed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta

from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.wrapping import Middleware, Result
from kubelend.wire import bodies

RESET = None


class DelayMiddleware(Middleware):
    """Waits before each call, and yields each instruction the same time after it was sent."""

    def __init__(self, inner: BrokerCommunicator, delay: timedelta) -> None:
        super().__init__(inner)
        self._seconds = delay.total_seconds()
        self._in_transit: deque[tuple[float, bodies.Instruction | None]] = deque()
        """Each with its arrival time. What one stream has not yielded comes with the next."""
        self._arrived = asyncio.Event()

    async def wrap_call(self, _: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        await asyncio.sleep(self._seconds)
        return await call()

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        sending = asyncio.create_task(self._read_ahead())
        sending.add_done_callback(lambda _: self._arrived.set())
        try:
            while await self._wait_for_item(sending):
                arrives_at, instruction = self._in_transit[0]
                await asyncio.sleep(arrives_at - asyncio.get_running_loop().time())
                self._in_transit.popleft()
                if instruction is RESET:
                    on_reset()
                else:
                    yield instruction
            await sending  # raises the error by which it ended
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _read_ahead(self) -> None:
        """Reads ahead, so that instructions sent at the same time arrive at the same time."""
        async with aclosing(self._inner.stream(lambda: self._enqueue(RESET))) as instructions:
            async for instruction in instructions:
                self._enqueue(instruction)

    def _enqueue(self, item: bodies.Instruction | None) -> None:
        self._in_transit.append((asyncio.get_running_loop().time() + self._seconds, item))
        self._arrived.set()

    async def _wait_for_item(self, sending: asyncio.Task[None]) -> bool:
        while not self._in_transit and not sending.done():
            self._arrived.clear()
            await self._arrived.wait()
        return bool(self._in_transit)
