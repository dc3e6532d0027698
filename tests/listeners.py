"""An instruction listener in virtual time, with a broker that really decides."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

import make
import virtual_time
from fake_broker import FakeBroker
from kubelend.agent import stream
from kubelend.agent.health import ComponentHealth
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.agent.stream import InstructionListener
from kubelend.core.models import ReservationId


class Rig:
    """The listener of cluster `me`; `fields` are attributes of its broker."""

    def __init__(
        self, *, poll_every: timedelta = stream.POLL_INTERVAL, chance: float = 0.0, **fields: Any
    ) -> None:
        self.broker = FakeBroker("me", make.runner(me="cpu=8,memory=8Gi", other="cpu=8,memory=8Gi"))
        vars(self.broker).update(fields)
        self.reservations = ReservationCache()
        self.health = ComponentHealth(lambda: virtual_time.now().timestamp())
        self.changes: list[str] = []
        self.reservations.subscribe(self.changes.append)
        parts = self.broker, self.reservations, self.health
        self.listener = InstructionListener(*parts, poll_interval=poll_every, chance=lambda: chance)

    @property
    def runner(self) -> make.CommandRunner:
        return self.broker.runner

    def reserve(self) -> ReservationId:
        return self.runner.reserve("cpu=1,memory=1Gi", pinned="me")

    def phase(self, reservation: str) -> str | None:
        found = self.reservations.find(reservation)
        return None if found is None else found.status.phase

    def times(self, name: str) -> list[float]:
        return self.broker.times(name)

    def running(self) -> AbstractAsyncContextManager[None]:
        return virtual_time.running(self.listener.run())


listener = virtual_time.rig_decorator(Rig)
"""Decorates a test with a `rig` that runs; the parameters are those of `Rig`."""
