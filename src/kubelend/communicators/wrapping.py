"""Middleware around a communicator: delays, metrics, and detection of a second active agent.

A middleware overrides `wrap_call`, and `stream` if it handles streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from kubelend.agent.ports import BrokerCommunicator
from kubelend.wire import bodies

Result = TypeVar("Result")


class Middleware(ABC):
    """Passes every call on to another communicator."""

    def __init__(self, inner: BrokerCommunicator) -> None:
        self._inner = inner

    @abstractmethod
    async def wrap_call(self, name: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        """Make one call; `name` is that of its method."""

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        return await self.wrap_call("publish", lambda: self._inner.publish(advertisement))

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        return await self.wrap_call("request", lambda: self._inner.request(request, key))

    async def activate(self, reservation: str) -> bodies.Reservation:
        return await self.wrap_call("activate", lambda: self._inner.activate(reservation))

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        return await self.wrap_call("renew", lambda: self._inner.renew(reservation, duration))

    async def release(self, reservation: str) -> bodies.Reservation:
        return await self.wrap_call("release", lambda: self._inner.release(reservation))

    async def find(self, reservation: str) -> bodies.Reservation:
        return await self.wrap_call("find", lambda: self._inner.find(reservation))

    async def instructions(self) -> list[bodies.Reservation]:
        return await self.wrap_call("instructions", self._inner.instructions)

    def stream(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        return self._inner.stream(on_reset)

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        return await self.wrap_call("acknowledge", lambda: self._inner.acknowledge(reservation))

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        return await self.wrap_call("refuse", lambda: self._inner.refuse(reservation, reason))

    async def ping(self) -> None:
        await self.wrap_call("ping", self._inner.ping)

    async def close(self) -> None:
        await self._inner.close()
