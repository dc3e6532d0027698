"""A publisher for an agent without a broker: it writes the Advertisement object and nothing else."""

from __future__ import annotations

import asyncio
from typing import Final

from kubelend.agent import advertising
from kubelend.agent.advertising import AdvertisementConfig
from kubelend.agent.ports import Clock, LocalObjects
from kubelend.agent.showing import AdvertisementWriter
from kubelend.agent.standing import ComponentHealth
from kubelend.core.inventory import Inventory
from kubelend.kits import tasks
from kubelend.wire.objects import AdvertisementStatus, with_status

NO_BROKER_STATUS: Final = AdvertisementStatus(phase="Active", message="no broker configured")


class LocalPublisher:
    """Use `run` as a root task, in place of a publisher."""

    def __init__(
        self,
        settings: AdvertisementConfig,
        inventory: Inventory,
        objects: LocalObjects,
        health: ComponentHealth,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._inventory = inventory
        self._writer = AdvertisementWriter(objects, health)
        self._clock = clock

    async def run(self, measured: asyncio.Event) -> None:
        """Write the object once per interval from the first measurement on. Runs until cancelled."""
        await measured.wait()
        await tasks.run_all(
            {"measure": self._write_loop(), "write advertisement": self._writer.run()}
        )

    async def _write_loop(self) -> None:
        while True:
            now = self._clock()
            wanted = advertising.advertisement_object(
                self._settings, self._inventory.totals(), now, None
            )
            self._writer.submit(with_status(wanted, NO_BROKER_STATUS, now))
            await asyncio.sleep((self._settings.next_due(now) - now).total_seconds())
