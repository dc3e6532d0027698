"""Reads and writes the ProviderInstructions of the agent's own cluster, by reservation ID."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kubelend.agent import editing, provisions
from kubelend.agent.ports import Clock, Deleted, Listed, LocalObjects
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction, ProviderInstructionStatus


class InstructionObjects:
    """Covers objects in the agent's namespace whose names the agent gives; all others are ignored."""

    def __init__(self, objects: LocalObjects, namespace: str, clock: Clock) -> None:
        self._objects = objects
        self._namespace = namespace
        self._clock = clock

    async def all(self) -> list[tuple[str, ProviderInstruction]]:
        return list(self._managed(await self._objects.list(ProviderInstruction)))

    async def find(self, reservation: str) -> ProviderInstruction | None:
        return await self._objects.find(ProviderInstruction, self._key(reservation))

    def reservations_in(self, change: ProviderInstruction | Deleted | Listed) -> list[str]:
        """The reservations that a watch event concerns."""
        if isinstance(change, Listed):
            return [name for name, _ in self._managed(change.objects)]
        found = change.last_state if isinstance(change, Deleted) else change
        return [name for name, _ in self._managed([found])]

    async def apply(
        self, reservation: bodies.Reservation, stored: ProviderInstruction | None
    ) -> ProviderInstruction:
        """Apply the reservation to its object's spec."""
        wanted = provisions.provider_instruction(reservation, self._namespace)
        if stored is not None and stored.spec == wanted.spec:
            return stored
        return await editing.apply_object(self._objects, wanted)

    async def update_status(
        self, stored: ProviderInstruction, status: ProviderInstructionStatus
    ) -> None:
        """Update the status if it changes."""
        await editing.update_status(self._objects, stored, lambda _: status, self._clock)

    async def delete(self, reservation: str) -> None:
        await self._objects.delete(ProviderInstruction, self._key(reservation))

    def _key(self, reservation: str) -> str:
        return f"{self._namespace}/{provisions.provider_instruction_name(reservation)}"

    def _managed(self, found: Iterable[object]) -> Iterator[tuple[str, ProviderInstruction]]:
        for each in found:
            if isinstance(each, ProviderInstruction) and each.metadata.namespace == self._namespace:
                reservation = provisions.reservation_of_instruction(each)
                if reservation:
                    yield reservation, each
