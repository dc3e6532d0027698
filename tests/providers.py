"""A provider in virtual time, with a broker that really decides, objects and an inventory."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

import make
import virtual_time
from failing_objects import FailingObjects
from fake_broker import FakeBroker
from kubelend.agent import holds as agent_holds
from kubelend.agent.health import ComponentHealth
from kubelend.agent.holds import HoldTable
from kubelend.agent.provider import ProviderConfig, ProviderReconciler
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.inventory import Inventory
from kubelend.core.lending import LendingPolicy
from kubelend.core.models import ReservationId
from kubelend.core.pod_requests import Node, Pod
from kubelend.core.resources import Resources
from kubelend.wire.events import EventRecord
from kubelend.wire.objects import ProviderInstruction

EIGHT = "cpu=8,memory=8Gi"
FINISHED_FOR = 10 * make.MINUTE


class Rig:
    """A provider cluster `me`; `broker.runner` places on it or on `other`."""

    def __init__(
        self,
        *,
        nodes: str = EIGHT,
        policy: LendingPolicy | None = None,
        enforce: bool = True,
        offset: timedelta = make.NO_TIME,
        has_placeholders: bool = False,
        refuses_unheld: bool = False,
    ) -> None:
        """`offset`: how much its clock is ahead of the broker's."""
        large = "cpu=64,memory=64Gi"
        self.broker = FakeBroker("me", make.runner(me=large, other=large))
        self.objects = FailingObjects(self.now)
        self.offset = offset
        self.policy = policy
        self.enforce = enforce
        self.has_placeholders, self.refuses_unheld = has_placeholders, refuses_unheld
        self.emitted: list[EventRecord] = []
        self.restart()
        if nodes:
            self.measure(nodes)

    def now(self) -> datetime:
        return virtual_time.now() + self.offset

    def restart(self) -> None:
        """As after a restart of the agent: only the objects stay."""
        self.reservations, self.health = ReservationCache(), ComponentHealth()
        self.inventory = Inventory()
        self.hold_changes: list[dict[str, Resources]] = []
        """The holds after each change."""
        holds = HoldTable(
            self.inventory,
            self.policy,
            enforce=self.enforce,
            on_change=lambda: self.hold_changes.append(self.holds()),
        )
        self.provider = ProviderReconciler(
            ProviderConfig(
                "me", "lending", FINISHED_FOR, self.has_placeholders, self.refuses_unheld
            ),
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

    def running(self) -> AbstractAsyncContextManager[None]:
        return virtual_time.running(self.provider.run())

    def reserve(self, wanted: str = "cpu=3,memory=1Gi", **fields: Any) -> ReservationId:
        return self.broker.runner.reserve(wanted, pinned="me", **fields)

    async def notify(self, *reservations: str) -> None:
        """The current states arrive, as by the stream."""
        for found in reservations:
            self.reservations.put(self.broker.body(found))
        await virtual_time.settled()

    async def place(self, wanted: str = "cpu=3,memory=1Gi", **fields: Any) -> ReservationId:
        found = self.reserve(wanted, **fields)
        await self.notify(found)
        return found

    async def report_held(self, reservation: str, status: str, reason: str, message: str) -> None:
        """As the reconciler of placeholders."""
        found = await self.instruction(reservation)
        condition = agent_holds.held_condition(status, reason, message)
        written = agent_holds.with_held_condition(found, condition, self.now())
        await self.objects.set_status(replace(found, status=written))
        await virtual_time.settled()

    def release(self, reservation: str) -> None:
        self.broker.runner.release(ReservationId(reservation))

    def holds(self) -> dict[str, Resources]:
        return {name: hold.resources for name, hold in self.inventory.holds.items()}

    async def find_instruction(self, reservation: str) -> ProviderInstruction | None:
        return await self.objects.find(ProviderInstruction, f"lending/{reservation}-provider")

    async def instruction(self, reservation: str) -> ProviderInstruction:
        found = await self.find_instruction(reservation)
        assert found is not None
        return found

    async def phase(self, reservation: str) -> str | None:
        found = await self.find_instruction(reservation)
        return None if found is None else found.status.phase

    def is_acknowledged(self, reservation: str) -> bool:
        return self.broker.body(reservation).status.acknowledged_at is not None


provider = virtual_time.rig_decorator(Rig)
"""Decorates a test with a `rig` that runs; the parameters are those of `Rig`."""
