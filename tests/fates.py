"""Agents that end at a chosen place in their work, between one write or call and the next.

    fate = fates.bind(agent)          # before it starts
    await agent.start()
    fate.comes("after", "request")    # the broker has answered, and nobody has heard it
    await fate.has_come()
    await agent.kill()

From that moment on nothing more leaves the agent: neither a call nor a write, of whichever of its tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from agents import Agent
from kubelend.agent.ports import BrokerCommunicator, Deleted, Listed, LocalObjects
from kubelend.communicators.middleware import Middleware, Result
from kubelend.wire import bodies
from kubelend.wire.objects import Kind
from waiting import PATIENCE


class Fate:
    """Until it is told when to come, everything goes its way."""

    def __init__(self) -> None:
        self._place = ("", "")
        self._left = 0
        self._has_come = asyncio.Event()

    def comes(self, when: str, what: str, count: int = 1) -> None:
        """`before` or `after` the so-manieth call, or write as `apply ResourceRequest`, from now on."""
        self._place, self._left = (when, what), count

    async def has_come(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self._has_come.wait()

    async def meet(self, when: str, what: str) -> None:
        """Go on, unless it has come."""
        if (when, what) == self._place:
            self._left -= 1
            if self._left == 0:
                self._has_come.set()
        if self._has_come.is_set():
            await asyncio.Event().wait()

    async def around(self, what: str, act: Callable[[], Awaitable[Result]]) -> Result:
        await self.meet("before", what)
        answer = await act()
        await self.meet("after", what)
        return answer


def bind(agent: Agent) -> Fate:
    """A fate for the next life of an agent."""
    fate = Fate()
    agent.wrap = lambda inner: _Calls(inner, fate)
    agent.spoil = lambda inner: _Objects(inner, fate)
    return fate


class _Calls(Middleware):
    def __init__(self, inner: BrokerCommunicator, fate: Fate) -> None:
        super().__init__(inner)
        self._fate = fate

    async def wrap_call(self, name: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        return await self._fate.around(name, call)

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        async with aclosing(self._inner.stream(on_reset)) as instructions:
            async for instruction in instructions:
                await self._fate.meet("before", "instruction")
                yield instruction


class _Objects:
    def __init__(self, inner: LocalObjects, fate: Fate) -> None:
        self._inner = inner
        self._fate = fate

    async def list(self, kind: type[Kind]) -> list[Kind]:
        return await self._inner.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        return await self._inner.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        what = f"apply {wanted.kind}"
        return await self._fate.around(what, lambda: self._inner.apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        what = f"set_status {wanted.kind}"
        return await self._fate.around(what, lambda: self._inner.set_status(wanted))

    async def delete(self, kind: type[Kind], key: str) -> None:
        await self._fate.around(f"delete {kind.kind}", lambda: self._inner.delete(kind, key))

    def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        return self._inner.watch(kind)
