"""Agents that crash at a chosen point of their work, between one write or call and the next.

    crash = crash_points.install(agent)      # before it starts
    await agent.start()
    crash.at("after", "request")             # the broker has answered, and the agent has not received it
    await crash.reached()
    await agent.kill()

From that point on nothing more leaves the agent: neither a call nor a write, of any of its tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from agents import Agent
from kubelend.agent.ports import BrokerCommunicator, Deleted, Listed, LocalObjects
from kubelend.communicators.factory import Middleware, Result
from kubelend.wire import bodies
from kubelend.wire.objects import Kind
from waiting import PATIENCE


class CrashPoint:
    """Lets everything pass until `at` sets the point."""

    def __init__(self) -> None:
        self._point = ("", "")
        self._left = 0
        self._is_reached = asyncio.Event()

    def at(self, when: str, operation: str, count: int = 1) -> None:
        """`before` or `after` the n-th call, or write such as `apply ResourceRequest`, from now on."""
        self._point, self._left = (when, operation), count

    async def reached(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self._is_reached.wait()

    async def pass_by(self, when: str, operation: str) -> None:
        """Returns, unless the point is reached."""
        if (when, operation) == self._point:
            self._left -= 1
            if self._left == 0:
                self._is_reached.set()
        if self._is_reached.is_set():
            await asyncio.Event().wait()

    async def around(self, operation: str, act: Callable[[], Awaitable[Result]]) -> Result:
        await self.pass_by("before", operation)
        answer = await act()
        await self.pass_by("after", operation)
        return answer


def install(agent: Agent) -> CrashPoint:
    """Returns a crash point for the next run of an agent."""
    crash = CrashPoint()
    agent.wrap = lambda inner: _Calls(inner, crash)
    agent.wrap_objects = lambda inner: _Objects(inner, crash)
    return crash


class _Calls(Middleware):
    def __init__(self, inner: BrokerCommunicator, crash: CrashPoint) -> None:
        super().__init__(inner)
        self._crash = crash

    async def wrap_call(self, name: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        return await self._crash.around(name, call)

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        async with aclosing(self._inner.stream(on_reset)) as instructions:
            async for instruction in instructions:
                await self._crash.pass_by("before", "instruction")
                yield instruction


class _Objects:
    def __init__(self, inner: LocalObjects, crash: CrashPoint) -> None:
        self._inner = inner
        self._crash = crash

    async def list(self, kind: type[Kind]) -> list[Kind]:
        return await self._inner.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        return await self._inner.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        operation = f"apply {wanted.kind}"
        return await self._crash.around(operation, lambda: self._inner.apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        operation = f"set_status {wanted.kind}"
        return await self._crash.around(operation, lambda: self._inner.set_status(wanted))

    async def delete(self, kind: type[Kind], key: str) -> None:
        await self._crash.around(f"delete {kind.kind}", lambda: self._inner.delete(kind, key))

    def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        return self._inner.watch(kind)
