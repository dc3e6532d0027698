"""Simulated clusters: each says what it has, listens to its instructions, and does as it is told.

They speak to the broker as any cluster does, over mutual TLS with a certificate of their own; only the
nodes behind them are made up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies

INTERVAL = 5.0
"""Seconds between two advertisements."""
PATIENCE = 5.0
"""Seconds after which an instruction that has not come will not."""


class Described(NamedTuple):
    """A cluster in figures."""

    name: str
    region: str
    allocatable: bodies.Quantities
    allocated: bodies.Quantities
    cost: bodies.Cost

    def advertisement(self) -> bodies.Advertisement:
        return bodies.Advertisement(
            cluster_id=self.name,
            resources=bodies.Metrics(self.allocatable, self.allocatable, self.allocated),
            region=self.region,
            cost=self.cost,
        )


class Heard(NamedTuple):
    """An instruction, and when it came."""

    instruction: bodies.Instruction
    at: float


class SimulatedCluster:
    """Run it as a task; `joined` says when it has advertised and listens."""

    def __init__(self, described: Described, client: BrokerClient) -> None:
        self.name = described.name
        self.client = client
        self.joined = asyncio.Event()
        self.on_instruction: Callable[[bodies.Instruction], None] | None = None
        """With this set, it acknowledges by itself and tells; without, it leaves that to the story."""
        self._described = described
        self._heard: asyncio.Queue[Heard] = asyncio.Queue()

    async def run(self) -> None:
        """Until it is cancelled; a failure ends it."""
        await self.client.publish(self._described.advertisement())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._advertise())

    async def hears(self, action: str, wanted: Callable[[bodies.Reservation], bool]) -> Heard:
        """Wait for an instruction about such a reservation; those before it are passed over."""
        async with asyncio.timeout(PATIENCE):
            while True:
                heard = await self._heard.get()
                if heard.instruction.action == action and wanted(heard.instruction.reservation):
                    return heard

    async def _advertise(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            await self.client.publish(self._described.advertisement())

    async def _listen(self) -> None:
        async for instruction in self.client.stream(on_reset=self.joined.set):
            self._heard.put_nowait(Heard(instruction, time.perf_counter()))
            if self.on_instruction is not None:
                await self._obey(instruction)
                self.on_instruction(instruction)

    async def _obey(self, instruction: bodies.Instruction) -> None:
        found = instruction.reservation
        if instruction.action == "Hold" and found.status.acknowledged_at is None:
            await self.client.acknowledge(found.id)


TURIN = Described(
    "turin",
    "eu-south",
    bodies.Quantities("24", "96Gi", gpu="4"),
    bodies.Quantities("6", "20Gi", gpu="1"),
    bodies.Cost("0.03", "0.004", "0.60", currency="EUR"),
)
LYON = Described(
    "lyon",
    "eu-west",
    bodies.Quantities("48", "192Gi"),
    bodies.Quantities("41", "150Gi"),
    bodies.Cost("0.02", "0.003", currency="EUR"),
)
OSLO = Described(
    "oslo",
    "eu-north",
    bodies.Quantities("16", "64Gi", gpu="2"),
    bodies.Quantities("9", "30Gi", gpu="1"),
    bodies.Cost("0.02", "0.003", "0.45", currency="EUR"),
)
EVERYONE = (TURIN, LYON, OSLO)
