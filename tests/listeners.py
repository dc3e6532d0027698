"""A listener with a broker that decides at the other end; in virtual time."""

from __future__ import annotations

from asyncio import create_task
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import make
from desk_broker import DeskBroker
from kubelend.agent import stream
from kubelend.agent.health import ComponentHealth
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.agent.stream import InstructionListener
from kubelend.core.models import ReservationId
from virtual_time import now, settled, stopped


class Rig:
    """A cluster `me`, whose listener hears what the desk decides once it is told."""

    def __init__(
        self, *, poll_every: timedelta = stream.POLL_INTERVAL, chance: float = 0.0
    ) -> None:
        self.broker = DeskBroker("me", make.desk(me="cpu=8,memory=8Gi", other="cpu=8,memory=8Gi"))
        self.reservations, self.health = (
            ReservationCache(),
            ComponentHealth(lambda: now().timestamp()),
        )
        self.heard: list[str] = []
        self.reservations.subscribe(self.heard.append)
        self.listener = InstructionListener(
            self.broker,
            self.reservations,
            self.health,
            poll_interval=poll_every,
            chance=lambda: chance,
        )

    @property
    def desk(self) -> make.Desk:
        return self.broker.desk

    def reserve(self) -> ReservationId:
        return self.desk.reserve("cpu=1,memory=1Gi", pinned="me")

    def phase(self, reservation: str) -> str | None:
        found = self.reservations.find(reservation)
        return None if found is None else found.status.phase

    def times(self, name: str) -> list[float]:
        """When the broker was called so."""
        return [call.at for call in self.broker.named(name)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = create_task(self.listener.run())
        await settled()
        try:
            yield
        finally:
            await stopped(task)
