"""An instruction listener in virtual time, with a broker that really decides."""

from __future__ import annotations

from asyncio import create_task
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import make
from fake_broker import FakeBroker
from kubelend.agent import stream
from kubelend.agent.health import ComponentHealth
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.agent.stream import InstructionListener
from kubelend.core.models import ReservationId
from virtual_time import now, settled, stopped, with_rig


class Rig:
    """The listener of cluster `me`."""

    def __init__(self, poll_every: timedelta = stream.POLL_INTERVAL, chance: float = 0.0) -> None:
        self.broker = FakeBroker("me", make.runner(me="cpu=8,memory=8Gi", other="cpu=8,memory=8Gi"))
        self.reservations = ReservationCache()
        self.health = ComponentHealth(lambda: now().timestamp())
        self.changes: list[str] = []
        self.reservations.subscribe(self.changes.append)
        parts = self.broker, self.reservations, self.health
        self.listener = InstructionListener(*parts, poll_interval=poll_every, chance=lambda: chance)

    @property
    def desk(self) -> make.CommandRunner:
        return self.broker.desk

    def reserve(self) -> ReservationId:
        return self.desk.reserve("cpu=1,memory=1Gi", pinned="me")

    def phase(self, reservation: str) -> str | None:
        found = self.reservations.find(reservation)
        return None if found is None else found.status.phase

    def times(self, name: str) -> list[float]:
        """When this call was made."""
        return [call.at for call in self.broker.named(name)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = create_task(self.listener.run())
        await settled()
        try:
            yield
        finally:
            await stopped(task)


def listener(**settings: Any) -> Callable[..., Callable[..., None]]:
    """Decorates a test with a `rig` that runs; the parameters are those of `Rig`."""

    @asynccontextmanager
    async def open_rig() -> AsyncIterator[Rig]:
        rig = Rig(**settings)
        async with rig.running():
            yield rig

    return with_rig(open_rig)
