"""A publisher for an agent without a broker: it writes the Advertisement object and nothing else."""

from __future__ import annotations

import asyncio
from typing import Final

from kubelend.agent import advertising
from kubelend.agent.advertising import Advertising
from kubelend.agent.ports import Clock, LocalObjects
from kubelend.agent.showing import Display
from kubelend.agent.standing import Standing
from kubelend.core.inventory import Inventory
from kubelend.kits import tasks
from kubelend.wire.objects import AdvertisementStatus, with_status

ALONE: Final = AdvertisementStatus(phase="Active", message="no broker configured")


class Meter:
    """Use `run` as a root task, in place of a publisher."""

    def __init__(
        self,
        settings: Advertising,
        inventory: Inventory,
        objects: LocalObjects,
        standing: Standing,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._inventory = inventory
        self._display = Display(objects, standing)
        self._clock = clock

    async def run(self, measured: asyncio.Event) -> None:
        """Write the object once per interval from the first measurement on. Runs until cancelled."""
        await measured.wait()
        await tasks.run_all(
            {"measure": self._measure(), "write advertisement": self._display.run()}
        )

    async def _measure(self) -> None:
        while True:
            now = self._clock()
            wanted = advertising.shown(self._settings, self._inventory.totals(), now, None)
            self._display.show(with_status(wanted, ALONE, now))
            await asyncio.sleep((self._settings.due(now) - now).total_seconds())
