"""A requester in virtual time, with real objects and a broker that really decides.

@requester()
async def test_request_is_reserved(rig):
    key = await rig.create_request(cpu="2")
    await passed(60)
    await rig.expect(key, "Reserved", reservation_name="rsv-1")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

import make
import virtual_time
from failing_objects import FailingObjects
from fake_broker import FakeBroker
from kubelend.agent.health import ComponentHealth
from kubelend.agent.requester import ResourceRequestReconciler
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.wire.objects import (
    Metadata,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from virtual_time import now, settled, stopped

OFFERS = {"p1": "cpu=8,memory=16Gi,gpu=2", "p2": "cpu=4,memory=8Gi"}


def lending_broker() -> FakeBroker:
    """Of the requester `me`. Its providers always advertise, and reservations expire in time."""
    broker = FakeBroker("me", make.CommandRunner())
    broker.offers = OFFERS
    return broker


class Rig:
    """A requester and everything around it, which can be stopped and started again."""

    def __init__(
        self,
        *,
        objects: type[FailingObjects] = FailingObjects,
        chance: float = 0.0,
        **settings: Any,
    ) -> None:
        self.objects, self.broker = objects(), lending_broker()
        self.skew = timedelta()
        """How much its clock is ahead."""
        self._settings: dict[str, Any] = {"cluster_id": "me", "chance": lambda: chance} | settings
        self._task: asyncio.Task[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self.reservations, self.health = ReservationCache(), ComponentHealth()
        parts = (self.objects, self.broker, self.reservations, self.health)
        self.requester = ResourceRequestReconciler(*parts, self.now, **self._settings)

    def now(self) -> datetime:
        return now() + self.skew

    async def start(self) -> None:
        self._task = asyncio.create_task(self.requester.run())
        await settled()

    async def stop(self) -> None:
        """As a killed agent: only the objects and the broker stay."""
        task, self._task = self._task, None
        if task is not None:
            await stopped(task)
        self._reset()

    async def restart(self, **settings: Any) -> None:
        self._settings |= settings
        await self.stop()
        await self.start()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    async def create_request(
        self, name: str = "w", namespace: str = "default", cpu: str = "1", **spec: Any
    ) -> str:
        """Create a ResourceRequest; returns its key."""
        spec = {"requested_memory": "1Gi", **spec}
        wanted = ResourceRequestSpec(requested_cpu=cpu, **spec)
        made = await self.objects.apply(ResourceRequest(Metadata(name, namespace), wanted))
        await settled()
        return made.key

    async def change(self, key: str, **spec: Any) -> None:
        found = await self.found(key)
        await self.objects.apply(replace(found, spec=replace(found.spec, **spec)))
        await settled()

    async def delete(self, key: str) -> None:
        await self.objects.delete(ResourceRequest, key)
        await settled()

    async def found(self, key: str) -> ResourceRequest:
        found = await self.objects.find(ResourceRequest, key)
        assert found is not None, f"{key} is gone"
        return found

    async def is_there(self, key: str) -> bool:
        return await self.objects.find(ResourceRequest, key) is not None

    async def status(self, key: str) -> ResourceRequestStatus:
        return (await self.found(key)).status

    async def expect(self, key: str, phase: str, **fields: object) -> ResourceRequestStatus:
        """The status, which has this phase and these fields."""
        status, wanted = await self.status(key), {"phase": phase, **fields}
        assert {name: getattr(status, name) for name in wanted} == wanted
        return status

    async def set_finalizers(self, key: str, *finalizers: str) -> None:
        found = await self.found(key)
        await self.objects.apply(
            replace(found, metadata=replace(found.metadata, finalizers=finalizers))
        )

    async def writes(self, key: str) -> int:
        """How often the object was written."""
        return int((await self.found(key)).metadata.resource_version.partition("-")[0])

    async def instruction(self, key: str) -> ReservationInstruction:
        found = await self.objects.find(ReservationInstruction, key)
        assert found is not None, f"{key} is gone"
        return found

    async def instructions(self) -> list[str]:
        return [found.key for found in await self.objects.list(ReservationInstruction)]

    async def notify(self, reservation: str) -> None:
        """The current state of a reservation arrives, as by the stream."""
        self.reservations.put(self.broker.body(reservation))
        await settled()


requester = virtual_time.rig_decorator(Rig)
"""Decorates a test with a `rig` that runs; the parameters are those of `Rig`."""
