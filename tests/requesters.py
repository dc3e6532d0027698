"""A requester in virtual time, with real objects and a broker that really decides.

@requester()
async def test_request_is_reserved(rig):
    key = await rig.create_request(cpu="2")
    await passed(60)
    await rig.expect(key, "Reserved", reservation_name="rsv-1")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

import make
from fake_broker import FakeBroker
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
from virtual_time import now, settled, stopped, with_rig

TERMS = conversion.RequestLimits(make.HOUR, 24 * make.HOUR, make.HOUR)
OFFERS = {"p1": "cpu=8,memory=16Gi,gpu=2", "p2": "cpu=4,memory=8Gi"}
UNREACHABLE = BrokerUnreachable("no route")


def clock_off(by: timedelta) -> Callable[[], datetime]:
    """A clock that is wrong by so much."""
    return lambda: now() + by


class LendingBroker(FakeBroker):
    """Of the requester `me`. Its providers always advertise, and reservations expire in time."""

    def __init__(self, **offers: str) -> None:
        super().__init__("me", make.Desk(now=make.T0))
        self.offers = offers or OFFERS
        self.keys: list[str] = []
        """The idempotency key of each request."""
        self.loses_responses = False
        """Whether calls take effect without a response."""
        self.response_delay = 0.0
        """Seconds between the decision and the response."""

    @property
    def reserved(self) -> dict[str, str]:
        """Reserved amounts by provider."""
        amounts = {name: self.desk.reserved(name) for name in self.offers}
        return {name: amount.describe() for name, amount in amounts.items() if amount}

    def advance(self) -> None:
        """Expire what is due, and advertise."""
        self.desk.now = now()
        self.desk.expire()
        for name, offer in self.offers.items():
            self.desk.advertise(name, offer)

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        self.keys.append(key)
        await self._called("request")
        wanted = conversion.to_request(request, ClusterId(self.cluster), key, TERMS)
        decision = self.desk.ask(wanted)
        if isinstance(decision, NoFit):
            raise explanations.no_capacity_error(decision.explanation)
        return await self._response(decision)

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        await self._called("renew", reservation)
        found = self.desk[ReservationId(reservation)]
        longer = durations.parse_duration(duration) if duration else found.request.duration
        self.desk.renew(found.id, longer)
        return await self._response(found.id)

    async def release(self, reservation: str) -> bodies.Reservation:
        await self._called("release", reservation)
        self.desk.release(ReservationId(reservation), Reason.BY_REQUESTER)
        return await self._response(ReservationId(reservation))

    async def _called(self, name: str, reservation: str = "") -> None:
        await super()._called(name, reservation)
        self.advance()

    async def _response(self, reservation: ReservationId) -> bodies.Reservation:
        body = self.body(reservation)
        await asyncio.sleep(self.response_delay)
        if self.loses_responses:
            raise UNREACHABLE
        return body


class FailingObjects(MemoryObjects):
    """Writes fail while `error` is set."""

    def __init__(self) -> None:
        super().__init__(now)
        self.error: Exception | None = None

    async def apply(self, wanted: Kind) -> Kind:
        self._fail()
        return await super().apply(wanted)

    async def set_status(self, wanted: Kind) -> Kind | None:
        self._fail()
        return await super().set_status(wanted)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


class Rig:
    """A requester and everything around it."""

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


def requester(**settings: Any) -> Callable[..., Callable[..., None]]:
    """Decorates a test with a `rig`; the parameters are those of `Rig`."""
    return with_rig(lambda: running(**settings))


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
