"""A peering reconciler in virtual time, with real objects and a fake peering.

@peering()
async def test_connects(rig):
    await rig.instruct("rsv-1", "one")
    assert rig.peering.connected == {("rsv-1", "one")}
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from msgspec.structs import replace

import make
import virtual_time
from fake_broker import FakeBroker
from kubelend.agent import instructions
from kubelend.agent.health import ComponentHealth
from kubelend.agent.peering import PeeringReconciler
from kubelend.agent.ports import DONE, Peer, Readiness
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.errors import KubelendError
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.events import EventRecord
from kubelend.wire.objects import ReservationInstruction, ReservationInstructionStatus, with_status
from virtual_time import now, settled

AMOUNTS = bodies.Quantities("500m", "1Gi", gpu="2")


class FakePeering:
    """Connects at once, unless errors or durations are set."""

    def __init__(self) -> None:
        self.connected: set[tuple[str, str]] = set()
        """By reservation and provider."""
        self.sizes: dict[str, str] = {}
        self.calls: list[str] = []
        self.errors: dict[str, KubelendError] = {}
        """By call, or by call and provider: `connect`, `disconnect one`."""
        self.seconds: dict[str, float] = {}
        self.unready: dict[str, str] = {}
        """The reason, by reservation, or by reservation and provider: `rsv-1 two`."""
        self.incomplete: dict[str, Readiness] = {}
        """What `connect` and `disconnect` wait for."""
        self.notify: Callable[[str], None] = lambda _: None
        """Tells the reconciler of a change."""

    async def watch(self, on_change: Callable[[str], None]) -> None:
        self.notify = on_change
        await asyncio.Event().wait()

    async def connect(self, peer: Peer) -> Readiness:
        await self._call("connect", peer)
        self.connected.add((peer.reservation, peer.cluster))
        return self.incomplete.get("connect", DONE)

    async def size(self, peer: Peer) -> Readiness:
        await self._call("size", peer)
        self.sizes[peer.reservation] = peer.resources.describe()
        return DONE

    async def ready(self, peer: Peer) -> Readiness:
        await self._call("ready", peer)
        names = (peer.reservation, f"{peer.reservation} {peer.cluster}")
        reason = "".join(self.unready.get(name, "") for name in names)
        return Readiness(not reason, reason or "node ready")

    async def disconnect(self, peer: Peer) -> Readiness:
        await self._call("disconnect", peer)
        if "disconnect" in self.incomplete:
            return self.incomplete["disconnect"]
        self.connected.discard((peer.reservation, peer.cluster))
        return DONE

    def count(self, call: str) -> int:
        return sum(made.startswith(call + " ") for made in self.calls)

    async def _call(self, call: str, peer: Peer) -> None:
        self.calls.append(f"{call} {peer.cluster} {peer.reservation}")
        for name in (call, f"{call} {peer.cluster}"):
            await asyncio.sleep(self.seconds.get(name, 0))
            if name in self.errors:
                raise self.errors[name]


class ActivatingBroker(FakeBroker):
    """Activates what is in a cache of reservations."""

    def __init__(self, reservations: ReservationCache) -> None:
        super().__init__("me", make.runner())
        self._reservations = reservations

    @property
    def activated(self) -> list[str]:
        return [call.reservation for call in self.named("activate")]

    async def activate(self, reservation: str) -> bodies.Reservation:
        await self._called("activate", reservation)
        known = self._reservations.find(reservation)
        assert known is not None
        status = replace(known.status, phase="Active")
        return replace(known, status=status, revision=known.revision + 1)


class Rig:
    """A peering reconciler and everything around it."""

    def __init__(self) -> None:
        self.objects = MemoryObjects(now)
        self.reservations = ReservationCache()
        self.health = ComponentHealth()
        self.peering = FakePeering()
        self.broker = ActivatingBroker(self.reservations)
        self.events: list[EventRecord] = []
        self.restart()

    def restart(self) -> None:
        """As after a restart of the agent: only the objects stay."""
        self.reconciler = PeeringReconciler(
            self.objects,
            self.broker,
            self.reservations,
            self.peering,
            self.health,
            now,
            emit=self.events.append,
        )

    def known(self, name: str) -> bodies.Reservation:
        """The latest state of a reservation."""
        found = self.reservations.find(name)
        assert found is not None
        return found

    def running(self) -> AbstractAsyncContextManager[None]:
        return virtual_time.running(self.reconciler.run())

    @property
    def error(self) -> str:
        return self.health.errors.get("peering", "")

    async def instruct(
        self,
        name: str,
        target: str,
        phase: str = "Reserved",
        *,
        is_acknowledged: bool = True,
        finalizers: tuple[str, ...] = (),
    ) -> str:
        """The state of a reservation and its ReservationInstruction; returns the key."""
        self.notify(name, target, phase, is_acknowledged=is_acknowledged)
        wanted = instructions.reservation_instruction(self.known(name), "default")
        wanted = replace(wanted, metadata=replace(wanted.metadata, finalizers=finalizers))
        found = await self.objects.find(ReservationInstruction, wanted.key)
        await self.objects.apply(wanted if found is None else replace(found, spec=wanted.spec))
        await settled()
        return wanted.key

    def notify(self, name: str, target: str, phase: str, *, is_acknowledged: bool = True) -> None:
        """A newer state of the reservation arrives."""
        known = self.reservations.find(name)
        revision = 1 if known is None else known.revision + 1
        acknowledged = make.T0 if is_acknowledged else None
        status = bodies.ReservationStatus(phase, "", acknowledged_at=acknowledged)
        self.reservations.put(
            bodies.Reservation(name, "me", target, AMOUNTS, status, make.T0, revision=revision)
        )

    async def finish(self, key: str) -> None:
        """The reservation has finished: what the requester writes."""
        found = await self.found(key)
        status = instructions.finished_instruction_status(found, None, now())
        await self.objects.set_status(with_status(found, status, now()))
        await settled()

    async def delete(self, key: str) -> None:
        await self.objects.delete(ReservationInstruction, key)
        await settled()

    async def delete_by_force(self, key: str) -> None:
        """Without its finalizer."""
        found = await self.found(key)
        await self.objects.apply(replace(found, metadata=replace(found.metadata, finalizers=())))
        await self.delete(key)

    async def found(self, key: str) -> ReservationInstruction:
        found = await self.objects.find(ReservationInstruction, key)
        assert found is not None
        return found

    async def status(self, key: str) -> ReservationInstructionStatus:
        return (await self.found(key)).status

    async def expect(self, key: str, phase: str, message: str, *clusters: str) -> None:
        """The status has this phase and message, and these providers are recorded."""
        status = await self.status(key)
        assert (status.phase, status.message) == (phase, message)
        assert status.started_cluster_ids == clusters

    async def is_gone(self, key: str) -> bool:
        return await self.objects.find(ReservationInstruction, key) is None


peering = virtual_time.rig_decorator(Rig)
"""Decorates a test with a `rig` that runs."""
