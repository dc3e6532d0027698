"""A communicator that accepts advertisements or fails, as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.core.errors import KubelendError
from kubelend.wire import bodies


class Accepted(NamedTuple):
    at: datetime
    body: bodies.Advertisement


class ScriptedCommunicator:
    """Accepts every advertisement unless `error` is set; other calls are not implemented."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.accepted: list[Accepted] = []
        self.tries: list[datetime] = []
        self.error: Callable[[], KubelendError] | None = None
        self.seconds = 0.0
        """Duration of a call."""
        self.available: bodies.Amounts | None = None
        self.reservations: list[bodies.Reservation] = []
        self._clock = clock

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        self.tries.append(self._clock())
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error()
        self.accepted.append(Accepted(self._clock(), advertisement))
        resources = replace(advertisement.resources, available=self.available)
        return bodies.PublishResult(replace(advertisement, resources=resources), self.reservations)

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
