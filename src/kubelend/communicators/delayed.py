"""A network with a delay, for simulated clusters: every call and every instruction takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta

from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.wrapping import Answer, Wrapped
from kubelend.wire import bodies

Sleep = Callable[[float], Awaitable[None]]


class Delayed(Wrapped):
    """Waits before each call and before it hands an instruction on."""

    def __init__(
        self, inner: BrokerCommunicator, delay: timedelta, *, sleep: Sleep = asyncio.sleep
    ) -> None:
        super().__init__(inner)
        self._seconds = delay.total_seconds()
        self._sleep = sleep

    async def around(self, _: str, call: Callable[[], Awaitable[Answer]], /) -> Answer:
        await self._sleep(self._seconds)
        return await call()

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        async with aclosing(self._inner.stream(on_reset)) as instructions:
            async for instruction in instructions:
                await self._sleep(self._seconds)
                yield instruction
