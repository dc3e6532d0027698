"""A publisher and all that it works with, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import make
from kubelend.agent.advertisement import AdvertisementConfig
from kubelend.agent.health import ComponentHealth
from kubelend.agent.ports import Clock, LocalObjects
from kubelend.agent.publisher import Publisher
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.errors import BrokerUnreachable
from kubelend.core.inventory import Inventory
from kubelend.core.pod_requests import Node, Pod
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.objects import Advertisement
from scripted_communicator import ScriptedCommunicator
from virtual_time import now, settled, stopped

ALL = make.resources("cpu=10,memory=100Gi")


class Rig:
    """One node with 10 cores. Advertisements are due at full half minutes, unless the settings differ."""

    def __init__(
        self,
        *,
        clock: Clock = now,
        chance: float = 0.0,
        objects: LocalObjects | None = None,
        **settings: Any,
    ) -> None:
        self.inventory, self.health = Inventory(), ComponentHealth()
        self.broker, self.objects = ScriptedCommunicator(now), objects or MemoryObjects(now)
        self.reservations, self.measured = ReservationCache(), asyncio.Event()
        self.publisher = Publisher(
            settings=AdvertisementConfig(**{"cluster_id": "a", "align": True, **settings}),
            inventory=self.inventory,
            communicator=self.broker,
            reservations=self.reservations,
            objects=self.objects,
            health=self.health,
            clock=clock,
            chance=lambda: chance,
        )

    def measure(self, cpu: str = "1") -> None:
        self.inventory.reset([Node("n", ALL, ALL)], [])
        self.use(cpu)
        self.measured.set()

    def use(self, cpu: str) -> None:
        self.inventory.put_pod(Pod("p", "n", make.resources(f"cpu={cpu},memory=1Gi")))
        self.publisher.notify_changed()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        task = asyncio.create_task(self.publisher.run(self.measured))
        yield
        await stopped(task)

    def moments(self) -> list[float]:
        """Of every accepted advertisement, in seconds from the start."""
        return [round((each.at - make.T0) / make.SECOND, 3) for each in self.broker.accepted]

    def tries(self) -> list[float]:
        """Of every call, in seconds from the start."""
        return [round((at - make.T0) / make.SECOND, 3) for at in self.broker.tries]

    def cpus(self) -> list[str | int]:
        """What was advertised as allocated, each time."""
        found = [each.body.resources.allocated for each in self.broker.accepted]
        return [allocated.cpu for allocated in found if allocated is not None]

    async def shown(self) -> Advertisement:
        await settled()
        found = await self.objects.find(Advertisement, "default/cluster-advertisement")
        assert found is not None
        return found


async def until(seconds: float) -> None:
    """Let time pass, up to so many seconds from the start."""
    await asyncio.sleep(seconds - asyncio.get_running_loop().time())


def unreachable() -> BrokerUnreachable:
    return BrokerUnreachable("no route to the broker")
