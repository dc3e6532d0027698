"""Reads and writes the ProviderInstructions of the agent's own cluster, by reservation ID."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kubelend.agent import editing, provisions
from kubelend.agent.ports import Clock, Deleted, Listed, LocalObjects
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction, ProviderInstructionStatus


class Filing:
    """Covers objects in the agent's namespace whose names the agent gives; all others are ignored."""

    def __init__(self, kept: LocalObjects, namespace: str, clock: Clock) -> None:
        self._objects = kept
        self._namespace = namespace
        self._clock = clock

    async def all(self) -> list[tuple[str, ProviderInstruction]]:
        return list(self._ours(await self._objects.list(ProviderInstruction)))

    async def find(self, reservation: str) -> ProviderInstruction | None:
        return await self._objects.find(ProviderInstruction, self._key(reservation))

    def named(self, change: ProviderInstruction | Deleted | Listed) -> list[str]:
        """The reservations that a watch event concerns."""
        if isinstance(change, Listed):
            return [name for name, _ in self._ours(change.objects)]
        found = change.found if isinstance(change, Deleted) else change
        return [name for name, _ in self._ours([found])]

    async def write(
        self, reservation: bodies.Reservation, kept: ProviderInstruction | None
    ) -> ProviderInstruction:
        """Apply the reservation to its object's spec."""
        wanted = provisions.instruction(reservation, self._namespace)
        if kept is not None and kept.spec == wanted.spec:
            return kept
        return await editing.put(self._objects, wanted)

    async def say(self, kept: ProviderInstruction, status: ProviderInstructionStatus) -> None:
        """Update the status if it changes."""
        await editing.state(self._objects, kept, lambda _: status, self._clock)

    async def remove(self, reservation: str) -> None:
        await self._objects.delete(ProviderInstruction, self._key(reservation))

    def _key(self, reservation: str) -> str:
        return f"{self._namespace}/{provisions.name_of(reservation)}"

    def _ours(self, found: Iterable[object]) -> Iterator[tuple[str, ProviderInstruction]]:
        for each in found:
            if isinstance(each, ProviderInstruction) and each.metadata.namespace == self._namespace:
                reservation = provisions.reservation_of(each)
                if reservation:
                    yield reservation, each
