"""A provider in virtual time, with a broker that really decides, objects and an inventory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

import make
import virtual_time
from fake_broker import FakeBroker
from kubelend.agent.health import ComponentHealth
from kubelend.agent.holds import HoldTable
from kubelend.agent.provider import ProviderConfig, ProviderReconciler
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.errors import KubelendError
from kubelend.core.inventory import Inventory
from kubelend.core.lending import LendingPolicy
from kubelend.core.models import ReservationId
from kubelend.core.pod_requests import Node, Pod
from kubelend.core.resources import Resources
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.events import EventRecord
from kubelend.wire.objects import Kind, ProviderInstruction

EIGHT = "cpu=8,memory=8Gi"
FINISHED_FOR = 10 * make.MINUTE


class FailingObjects(MemoryObjects):
    """Reads and writes fail while `error` is set."""

    error: KubelendError | None = None
    has_conflicts = False
    """Whether another client changes each object just before its status is set for the first time."""

    async def list(self, kind: type[Kind]) -> list[Kind]:
        self._check()
        return await super().list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        self._check()
        return await super().find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        self._check()
        return await super().apply(wanted)

    async def set_status(self, wanted: Kind) -> Kind | None:
        found = await super().find(type(wanted), wanted.key)
        if self.has_conflicts and found is not None and not found.metadata.labels:
            await super().apply(
                replace(found, metadata=replace(found.metadata, labels={"team": "a"}))
            )
        return await super().set_status(wanted)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


class Rig:
    """A provider cluster `me`; `broker.desk` places on it or on `other`."""

    def __init__(
        self,
        *,
        nodes: str = EIGHT,
        policy: LendingPolicy | None = None,
        enforce: bool = True,
        offset: timedelta = make.NO_TIME,
    ) -> None:
        """`offset`: how much its clock is ahead of the broker's."""
        desk = make.desk(me="cpu=64,memory=64Gi", other="cpu=64,memory=64Gi")
        self.broker = FakeBroker("me", desk)
        self.objects = FailingObjects(self.now)
        self.offset = offset
        self.policy = policy
        self.enforce = enforce
        self.emitted: list[EventRecord] = []
        self.restart()
        if nodes:
            self.measure(nodes)

    def now(self) -> datetime:
        return virtual_time.now() + self.offset

    def restart(self) -> None:
        """As after a restart of the agent: only the objects stay."""
        self.reservations, self.health, self.inventory = (
            ReservationCache(),
            ComponentHealth(),
            Inventory(),
        )
        self.hold_changes: list[dict[str, Resources]] = []
        """The holds after each change."""
        holds = HoldTable(
            self.inventory,
            self.policy,
            enforce=self.enforce,
            on_change=lambda: self.hold_changes.append(self.holds()),
        )
        self.provider = ProviderReconciler(
            ProviderConfig("me", "lending", FINISHED_FOR),
            self.objects,
            self.broker,
            self.reservations,
            holds,
            self.health,
            self.now,
            emit=self.emitted.append,
        )

    def measure(self, nodes: str = EIGHT, pods: str = "") -> None:
        node = Node("n", make.resources(nodes), make.resources(nodes))
        used = [Pod("p", "n", make.resources(pods))] if pods else []
        self.inventory.reset([node], used)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.provider.run())
        await virtual_time.settled()
        try:
            yield
        finally:
            await virtual_time.stopped(task)

    def reserve(self, wanted: str = "cpu=3,memory=1Gi", **fields: Any) -> ReservationId:
        return self.broker.desk.reserve(wanted, pinned="me", **fields)

    async def notify(self, *reservations: str) -> None:
        """The current states arrive, as by the stream."""
        for found in reservations:
            self.reservations.put(self.broker.body(found))
        await virtual_time.settled()

    async def place(self, wanted: str = "cpu=3,memory=1Gi", **fields: Any) -> ReservationId:
        found = self.reserve(wanted, **fields)
        await self.notify(found)
        return found

    def release(self, reservation: str) -> None:
        self.broker.desk.release(ReservationId(reservation))

    def holds(self) -> dict[str, Resources]:
        return {name: hold.resources for name, hold in self.inventory.holds.items()}

    async def find_instruction(self, reservation: str) -> ProviderInstruction | None:
        return await MemoryObjects.find(
            self.objects, ProviderInstruction, f"lending/{reservation}-provider"
        )

    async def instruction(self, reservation: str) -> ProviderInstruction:
        found = await self.find_instruction(reservation)
        assert found is not None
        return found

    async def phase(self, reservation: str) -> str | None:
        found = await self.find_instruction(reservation)
        return None if found is None else found.status.phase

    def is_acknowledged(self, reservation: str) -> bool:
        return self.broker.body(reservation).status.acknowledged_at is not None


def provider(**settings: Any) -> Callable[..., Callable[..., None]]:
    """Decorates a test with a `rig` that runs; the parameters are those of `Rig`."""

    @asynccontextmanager
    async def open_rig() -> AsyncIterator[Rig]:
        rig = Rig(**settings)
        async with rig.running():
            yield rig

    return virtual_time.with_rig(open_rig)
