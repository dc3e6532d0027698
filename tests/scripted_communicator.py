"""A broker at the other end of the port, as a test wants it: it hears advertisements, or is in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.core.errors import KubelendError
from kubelend.wire import bodies


class Heard(NamedTuple):
    at: datetime
    body: bodies.Advertisement


class ScriptedCommunicator:
    """Takes every advertisement, unless it is given a reason not to. All else is not in its script."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.heard: list[Heard] = []
        self.tries: list[datetime] = []
        self.trouble: Callable[[], KubelendError] | None = None
        self.seconds = 0.0
        """How long it takes to answer."""
        self.available: bodies.Amounts | None = None
        self.promises: list[bodies.Reservation] = []
        self._clock = clock

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        self.tries.append(self._clock())
        await asyncio.sleep(self.seconds)
        if self.trouble is not None:
            raise self.trouble()
        self.heard.append(Heard(self._clock(), advertisement))
        resources = replace(advertisement.resources, available=self.available)
        return bodies.PublishResult(replace(advertisement, resources=resources), self.promises)

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        raise NotImplementedError

    async def activate(self, reservation: str) -> bodies.Reservation:
        raise NotImplementedError

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        raise NotImplementedError

    async def release(self, reservation: str) -> bodies.Reservation:
        raise NotImplementedError

    async def find(self, reservation: str) -> bodies.Reservation:
        raise NotImplementedError

    async def instructions(self) -> list[bodies.Reservation]:
        raise NotImplementedError

    def stream(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        raise NotImplementedError

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        raise NotImplementedError

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        raise NotImplementedError

    async def ping(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
