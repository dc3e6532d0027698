"""A keeper of peerings and all that it works with, in virtual time: real objects, and a peering to steer.

async with joiners.running() as rig:
    key = await rig.instruct("rsv-1", "one")
    assert rig.peering.joined == {("rsv-1", "one")}
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta

from msgspec.structs import replace

import make
from kubelend.agent import instructions
from kubelend.agent.health import ComponentHealth
from kubelend.agent.peering import PeeringReconciler
from kubelend.agent.ports import Peer, Readiness
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.errors import KubelendError
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.objects import ReservationInstruction, ReservationInstructionStatus, with_status
from scripted_communicator import ScriptedCommunicator
from virtual_time import now, settled, stopped

AMOUNTS = bodies.Quantities("500m", "1Gi", gpu="2")


class SteeredPeering:
    """Joins at once, unless it is told to fail, to hang or to take its time."""

    def __init__(self) -> None:
        self.joined: set[tuple[str, str]] = set()
        """By reservation and provider."""
        self.sizes: dict[str, str] = {}
        self.calls: list[str] = []
        self.fails: dict[str, KubelendError] = {}
        """By call, or by call and provider: `connect`, `disconnect one`."""
        self.seconds: dict[str, float] = {}
        self.unready: dict[str, str] = {}
        """Why, by reservation."""

    async def connect(self, peer: Peer) -> None:
        await self._do("connect", peer)
        self.joined.add((peer.reservation, peer.cluster))

    async def size(self, peer: Peer) -> None:
        await self._do("size", peer)
        self.sizes[peer.reservation] = peer.resources.describe()

    async def ready(self, peer: Peer) -> Readiness:
        await self._do("ready", peer)
        reason = self.unready.get(peer.reservation, "")
        return Readiness(not reason, reason or "all is well")

    async def disconnect(self, peer: Peer) -> None:
        await self._do("disconnect", peer)
        self.joined.discard((peer.reservation, peer.cluster))

    def count(self, call: str) -> int:
        return sum(made.startswith(call + " ") for made in self.calls)

    async def _do(self, call: str, peer: Peer) -> None:
        self.calls.append(f"{call} {peer.cluster} {peer.reservation}")
        for name in (call, f"{call} {peer.cluster}"):
            await asyncio.sleep(self.seconds.get(name, 0))
            if name in self.fails:
                raise self.fails[name]


class Activating(ScriptedCommunicator):
    """A broker that only hears of what is used."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(now)
        self.activated: list[str] = []
        self.hangs = False
        self._rig = rig

    async def activate(self, reservation: str) -> bodies.Reservation:
        self.activated.append(reservation)
        await asyncio.sleep(3600 if self.hangs else 0)
        if self.trouble is not None:
            raise self.trouble()
        known = self._rig.reservations.find(reservation)
        assert known is not None
        status = replace(known.status, phase="Active")
        return replace(known, status=status, revision=known.revision + 1)


class Rig:
    """What a test can move, and see moving."""

    def __init__(self) -> None:
        self.objects = MemoryObjects(now)
        self.reservations = ReservationCache()
        self.health = ComponentHealth()
        self.peering = SteeredPeering()
        self.broker = Activating(self)
        self.keeper = self.new_keeper()

    def new_keeper(self) -> PeeringReconciler:
        """As after a restart, with the same objects."""
        return PeeringReconciler(
            self.objects, self.broker, self.reservations, self.peering, self.health, now
        )

    def known(self, name: str) -> bodies.Reservation:
        """The newest word on a reservation that there must be."""
        found = self.reservations.find(name)
        assert found is not None
        return found

    @property
    def problem(self) -> str:
        return self.health.errors.get("peering", "")

    async def instruct(
        self, name: str, target: str, phase: str = "Reserved", *, is_acknowledged: bool = True
    ) -> str:
        """What the requester writes for a reservation, as the broker's word comes; gives its key."""
        self.tell(name, target, phase, is_acknowledged=is_acknowledged)
        wanted = instructions.reservation_instruction(self.known(name), "default")
        found = await self.objects.find(ReservationInstruction, wanted.key)
        await self.objects.apply(wanted if found is None else replace(found, spec=wanted.spec))
        await settled()
        return wanted.key

    def tell(self, name: str, target: str, phase: str, *, is_acknowledged: bool = True) -> None:
        """The broker's newest word."""
        known = self.reservations.find(name)
        revision = 1 if known is None else known.revision + 1
        answered = make.T0 if is_acknowledged else None
        status = bodies.ReservationStatus(phase, "", acknowledged_at=answered)
        self.reservations.put(
            bodies.Reservation(name, "me", target, AMOUNTS, status, make.T0, revision=revision)
        )

    async def finish(self, key: str) -> None:
        """What the requester writes at the end."""
        found = await self.found(key)
        status = instructions.finished_instruction_status(found.status, None, now())
        await self.objects.set_status(with_status(found, status, now()))
        await settled()

    async def delete(self, key: str) -> None:
        await self.objects.delete(ReservationInstruction, key)
        await settled()

    async def take_away(self, key: str) -> None:
        """By force: with the finalizer that is to keep it."""
        found = await self.found(key)
        await self.objects.apply(replace(found, metadata=replace(found.metadata, finalizers=())))
        await self.delete(key)

    async def found(self, key: str) -> ReservationInstruction:
        found = await self.objects.find(ReservationInstruction, key)
        assert found is not None
        return found

    async def status(self, key: str) -> ReservationInstructionStatus:
        return (await self.found(key)).status

    async def is_gone(self, key: str) -> bool:
        return await self.objects.find(ReservationInstruction, key) is None


@asynccontextmanager
async def running(rig: Rig | None = None) -> AsyncGenerator[Rig, None]:
    rig = rig or Rig()
    task = asyncio.create_task(rig.keeper.run())
    await settled()
    try:
        yield rig
    finally:
        await stopped(task)


async def passed(seconds: float) -> None:
    await asyncio.sleep(timedelta(seconds=seconds).total_seconds())
    await settled()
