"""`kubelend dev lab test`: a ResourceRequest from its creation to its end, as the three API servers show it.

Nobody is asked but the API servers: each step is an object that was seen there, and its time is when.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

from kubelend.core import resources as amounts
from kubelend.core.errors import NoCapacity, Unavailable
from kubelend.kube import access, resources
from kubelend.kube.client import Client
from kubelend.lab import hosts, rights
from kubelend.lab.records import Record
from kubelend.lab.sightings import Sighting, Sightings
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import (
    Metadata,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
)

CPU, MEMORY = "500m", "256Mi"
REQUESTER, PROVIDER = hosts.AGENTS

Tell = Callable[[str, float], None]
"""Something was seen, so many seconds after what began it."""

_REQUESTS = resources.of(ResourceRequest)
_DELETED_WITHIN = 10.0
_BEGUN_WITHIN = 20.0


async def walk(record: Record, tell: Tell, patience: timedelta) -> None:
    """All of it; raises at the first step that is not seen within `patience`."""
    async with _opened(record, patience.total_seconds()) as walker:
        walker.before = _reserved(walker.offers.last(f"{PROVIDER}-adv"))
        await walker.ask(tell)
        try:
            await walker.borrow(tell)
        finally:
            await walker.delete(tell)
        await walker.give_back(tell)


class Walker:
    """Sees, step by step, what becomes of one request."""

    def __init__(self, clients: dict[str, Client], patience: float) -> None:
        self.name = f"test-{secrets.token_hex(3)}"
        self.reservation = ""
        self.before = 0
        """What the provider had promised to others, in thousandths of a core."""
        self._client = clients[REQUESTER]
        self._began = 0.0
        self._requests = Sightings(self._client, REQUESTER, ResourceRequest, patience)
        self._uses = Sightings(self._client, REQUESTER, ReservationInstruction, patience)
        self._holds = Sightings(clients[PROVIDER], PROVIDER, ProviderInstruction, patience)
        broker = clients[hosts.BROKER]
        self._reservations = Sightings(broker, hosts.BROKER, Reservation, patience)
        self.offers = Sightings(broker, hosts.BROKER, ClusterAdvertisement, patience)

    def sightings(self) -> list[Sightings[Any]]:
        return [self._requests, self._uses, self._holds, self._reservations, self.offers]

    async def ask(self, tell: Tell) -> None:
        self._began = time.perf_counter()
        spec = ResourceRequestSpec(requested_cpu=CPU, requested_memory=MEMORY, duration="1h")
        metadata = Metadata(self.name, rights.OBJECTS)
        await self._client.create(_REQUESTS, ResourceRequest(metadata, spec))
        self._say(tell, REQUESTER, f"{self.name} asks for {CPU} and {MEMORY}")

    async def borrow(self, tell: Tell) -> None:
        """Until both sides have what they need, and the requester uses it."""
        seen = await self._requests.first(self.name, _is_taken, "is not seen by the agent")
        self._say(tell, REQUESTER, "its agent has seen the ResourceRequest", seen)
        asked = await self._requests.first(self.name, _is_answered, "gets no answer")
        self.reservation = _granted(asked.found)
        kept = await self._reserved_as("Reserved")
        self._say(tell, hosts.BROKER, f"{self.reservation} is Reserved", kept)
        use = await self._uses.first(self.reservation, _is_there, "does not appear")
        self._say(tell, REQUESTER, "the ReservationInstruction is there", use)
        hold = await self._holds.first(self._hold, _has("Held"), "is not held")
        self._say(tell, PROVIDER, "the ProviderInstruction is there, and Held", hold)
        used = await self._reserved_as("Active")
        self._say(tell, hosts.BROKER, f"{self.reservation} is Active", used)
        active = await self._requests.first(self.name, _has("Active"), "is not Active")
        self._say(tell, REQUESTER, "the ResourceRequest is Active", active)
        await self._shows(tell, amounts.asked({"cpu": CPU}).cpu, f"shows {CPU} more as reserved")

    async def delete(self, tell: Tell) -> None:
        self._began = time.perf_counter()
        async with asyncio.timeout(_DELETED_WITHIN):
            await self._client.delete(_REQUESTS, self.name, rights.OBJECTS)
        self._say(tell, REQUESTER, f"{self.name} is deleted")

    async def give_back(self, tell: Tell) -> None:
        """Until nothing of it is left on any side."""
        over = await self._reserved_as("Released")
        self._say(tell, hosts.BROKER, f"{self.reservation} is Released", over)
        gone = await self._requests.first(self.name, lambda one: one.is_gone, "does not go")
        self._say(tell, REQUESTER, "the ResourceRequest is gone", gone)
        use = await self._uses.first(self.reservation, _has("Finished"), "does not end")
        self._say(tell, REQUESTER, "the ReservationInstruction is Finished", use)
        hold = await self._holds.first(self._hold, _has("Withdrawn"), "is not withdrawn")
        self._say(tell, PROVIDER, "the ProviderInstruction is Withdrawn", hold)
        await self._shows(tell, 0, "shows as reserved what it did before")

    @property
    def _hold(self) -> str:
        return f"{self.reservation}-provider"

    async def _reserved_as(self, phase: str) -> Sighting[Reservation]:
        return await self._reservations.first(self.reservation, _has(phase), f"is not {phase}")

    async def _shows(self, tell: Tell, more: int, what: str) -> None:
        name, began = f"{PROVIDER}-adv", self._began
        offer = await self.offers.first(
            name,
            lambda one: one.at > began and _reserved(one.found) == self.before + more,
            f"does not show the {CPU}",
        )
        self._say(tell, hosts.BROKER, f"{name} {what}", offer)

    def _say(self, tell: Tell, where: str, what: str, seen: Sighting[Any] | None = None) -> None:
        at = time.perf_counter() if seen is None else seen.at
        tell(f"{where}: {what}", at - self._began)


@asynccontextmanager
async def _opened(record: Record, patience: float) -> AsyncIterator[Walker]:
    """Once all that it will look at is watched."""
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(Client.open(access.from_kubeconfig(path)))
            for name, path in record.clusters.items()
        }
        walker = Walker(clients, patience)
        watches = [asyncio.create_task(one.run()) for one in walker.sightings()]
        try:
            async with asyncio.timeout(_BEGUN_WITHIN):
                await asyncio.gather(*(one.begun.wait() for one in walker.sightings()))
        except TimeoutError:
            raise Unavailable("the API servers do not let us watch") from None
        try:
            yield walker
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)


def _is_there(seen: Sighting[Any]) -> bool:
    return not seen.is_gone


def _has(phase: str) -> Callable[[Sighting[Any]], bool]:
    return lambda seen: seen.found.status.phase == phase


def _is_taken(seen: Sighting[ResourceRequest]) -> bool:
    """The agent's finalizer is the first that it writes."""
    return bool(seen.found.metadata.finalizers or seen.found.status.phase)


def _is_answered(seen: Sighting[ResourceRequest]) -> bool:
    status = seen.found.status
    return bool(status.reservation_name) or status.phase == "Failed"


def _granted(found: ResourceRequest) -> str:
    """The reservation's name; a refusal is told in the broker's words."""
    if not found.status.reservation_name:
        raise NoCapacity(found.status.message)
    return found.status.reservation_name


def _reserved(found: ClusterAdvertisement | None) -> int:
    shown = None if found is None else found.spec.resources.reserved
    return 0 if shown is None else amounts.offered({"cpu": str(shown.cpu)}).cpu
