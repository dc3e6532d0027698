"""The ProviderInstructions of the own cluster by reservation: how `agent.providing` reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kubelend.agent import editing, provisions
from kubelend.agent.ports import Clock, Deleted, Listed, LocalObjects
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction, ProviderInstructionStatus


class Filing:
    """Only those in the agent's namespace with names as it gives them; all others are somebody else's."""

    def __init__(self, kept: LocalObjects, namespace: str, clock: Clock) -> None:
        self._objects = kept
        self._namespace = namespace
        self._clock = clock

    async def all(self) -> list[tuple[str, ProviderInstruction]]:
        return list(self._ours(await self._objects.list(ProviderInstruction)))

    async def find(self, reservation: str) -> ProviderInstruction | None:
        return await self._objects.find(ProviderInstruction, self._key(reservation))

    def named(self, change: ProviderInstruction | Deleted | Listed) -> list[str]:
        """The reservations that a change speaks of."""
        if isinstance(change, Listed):
            return [name for name, _ in self._ours(change.objects)]
        found = change.found if isinstance(change, Deleted) else change
        return [name for name, _ in self._ours([found])]

    async def write(
        self, reservation: bodies.Reservation, kept: ProviderInstruction | None
    ) -> ProviderInstruction:
        """Have the object say what the reservation says."""
        wanted = provisions.instruction(reservation, self._namespace)
        if kept is not None and kept.spec == wanted.spec:
            return kept
        return await editing.put(self._objects, wanted)

    async def say(self, kept: ProviderInstruction, status: ProviderInstructionStatus) -> None:
        """Set its status, if that is to say something new."""
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
