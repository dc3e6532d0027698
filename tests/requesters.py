"""A requester and all that it works with, in virtual time: real objects, and a broker that really decides.

async with requesters.running() as rig:
    key = await rig.create_request(cpu="2")
    await rig.passed(60)
    assert (await rig.status(key)).phase == "Reserved"
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

import make
from desk_broker import DeskBroker
from kubelend.agent.health import ComponentHealth
from kubelend.agent.ports import LocalObjects
from kubelend.agent.requester import ResourceRequestReconciler
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core import durations, explanations
from kubelend.core.decision import NoFit
from kubelend.core.errors import BrokerUnreachable
from kubelend.core.lifecycle import Reason
from kubelend.core.models import ClusterId, ReservationId
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies, conversion
from kubelend.wire.objects import (
    Kind,
    Metadata,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from virtual_time import now, settled, stopped

TERMS = conversion.RequestLimits(make.HOUR, 24 * make.HOUR, make.HOUR)
OFFERS = {"p1": "cpu=8,memory=16Gi,gpu=2", "p2": "cpu=4,memory=8Gi"}
GONE = BrokerUnreachable("nobody answers")


def away(by: timedelta) -> Callable[[], datetime]:
    """A clock that is wrong."""
    return lambda: now() + by


class LendingBroker(DeskBroker):
    """One from which cluster `me` borrows. Its providers never fall silent, and what is over ends in time."""

    def __init__(self, **offers: str) -> None:
        super().__init__("me", make.Desk(now=make.T0))
        self.offers = offers or OFFERS
        self.keys: list[str] = []
        """Of each request that came."""
        self.loses_answers = False
        """Whether it does what it is asked, and nobody hears of it."""
        self.takes_after = 0.0
        """Seconds between its decision and the answer."""

    @property
    def reserved(self) -> dict[str, str]:
        """What is taken, by provider."""
        amounts = {name: self.desk.reserved(name) for name in self.offers}
        return {name: amount.describe() for name, amount in amounts.items() if amount}

    def turn(self) -> None:
        """Let everything happen that is due by now."""
        self.desk.now = now()
        self.desk.expire()
        for name, offer in self.offers.items():
            self.desk.advertise(name, offer)

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        self.keys.append(key)
        await self._called("request")
        asked = conversion.to_request(request, ClusterId(self.cluster), key, TERMS)
        answer = self.desk.ask(asked)
        if isinstance(answer, NoFit):
            raise explanations.no_capacity_error(answer.explanation)
        return await self._answer(answer)

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        await self._called("renew", reservation)
        found = self.desk[ReservationId(reservation)]
        longer = durations.parse_duration(duration) if duration else found.request.duration
        self.desk.renew(found.id, longer)
        return await self._answer(found.id)

    async def release(self, reservation: str) -> bodies.Reservation:
        await self._called("release", reservation)
        self.desk.release(ReservationId(reservation), Reason.BY_REQUESTER)
        return await self._answer(ReservationId(reservation))

    async def _called(self, name: str, reservation: str = "") -> None:
        await super()._called(name, reservation)
        self.turn()

    async def _answer(self, reservation: ReservationId) -> bodies.Reservation:
        body = self.body(reservation)
        await asyncio.sleep(self.takes_after)
        if self.loses_answers:
            raise GONE
        return body


class TroubledObjects(MemoryObjects):
    """Writes fail as long as there is a trouble for them."""

    def __init__(self) -> None:
        super().__init__(now)
        self.trouble: Exception | None = None

    async def apply(self, wanted: Kind) -> Kind:
        self._fail()
        return await super().apply(wanted)

    async def set_status(self, wanted: Kind) -> Kind | None:
        self._fail()
        return await super().set_status(wanted)

    def _fail(self) -> None:
        if self.trouble is not None:
            raise self.trouble


class Rig:
    """What a requester has around it."""

    def __init__(
        self,
        *,
        objects: LocalObjects | None = None,
        broker: LendingBroker | None = None,
        clock: Callable[[], datetime] = now,
        chance: float = 0.0,
        reservations: ReservationCache | None = None,
        **settings: Any,
    ) -> None:
        self.objects = objects or MemoryObjects(now)
        self.broker = broker or LendingBroker()
        self.reservations, self.health = reservations or ReservationCache(), ComponentHealth()
        self.requester = ResourceRequestReconciler(
            self.objects,
            self.broker,
            self.reservations,
            self.health,
            clock,
            cluster_id="me",
            chance=lambda: chance,
            **settings,
        )

    async def create_request(
        self, name: str = "w", namespace: str = "default", cpu: str = "1", **spec: Any
    ) -> str:
        """Make a request; gives its key."""
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

    async def writes(self, key: str) -> int:
        """How often it was written."""
        return int((await self.found(key)).metadata.resource_version.partition("-")[0])

    async def instruction(self, key: str) -> ReservationInstruction:
        found = await self.objects.find(ReservationInstruction, key)
        assert found is not None, f"{key} is gone"
        return found

    async def instructions(self) -> list[str]:
        return [found.key for found in await self.objects.list(ReservationInstruction)]

    async def hear(self, reservation: str) -> None:
        """The broker tells, as it does on its stream."""
        self.reservations.put(self.broker.body(reservation))
        await settled()


@asynccontextmanager
async def running(**settings: Any) -> AsyncGenerator[Rig, None]:
    """The parameters are those of `Rig`."""
    rig = Rig(**settings)
    task = asyncio.create_task(rig.requester.run())
    await settled()
    try:
        yield rig
    finally:
        await stopped(task)


async def passed(seconds: float) -> None:
    """Let time pass, and all that comes of it."""
    await asyncio.sleep(seconds)
    await settled()
