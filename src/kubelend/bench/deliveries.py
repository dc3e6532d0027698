"""Which promises reached those who keep them, and when: by what the broker said and what agents wrote."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from kubelend.agent import provisions
from kubelend.sources.memory import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.objects import Kind, ProviderInstruction

Timer = Callable[[], float]


class Deliveries:
    """Of all reservations of a run. The provider may know of one before the requester has its answer."""

    def __init__(self, timer: Timer = time.perf_counter) -> None:
        self._timer = timer
        self._promised: dict[str, tuple[str, float]] = {}
        """Who is to hold it, and when the requester was told so."""
        self._released: set[str] = set()
        self._held: dict[tuple[str, str], float] = {}
        """By reservation and provider."""
        self._withdrawn: set[tuple[str, str]] = set()

    # -- what the requester was told

    def promised(self, answer: bodies.Reservation) -> None:
        self._promised[answer.id] = answer.target_cluster_id, self._timer()

    def released(self, reservation: str) -> None:
        self._released.add(reservation)

    # -- what a provider did

    def written(self, cluster: str, found: ProviderInstruction) -> None:
        key = found.spec.reservation_name, cluster
        self._held.setdefault(key, self._timer())
        if found.status.phase == provisions.WITHDRAWN:
            self._withdrawn.add(key)

    # -- what that comes to

    @property
    def count(self) -> int:
        return len(self._promised)

    @property
    def missed(self) -> int:
        """Instructions that have not come: to hold something, or to let go of it again."""
        keys = {name: (name, provider) for name, (provider, _) in self._promised.items()}
        unheld = sum(key not in self._held for key in keys.values())
        return unheld + sum(keys.get(name) not in self._withdrawn for name in self._released)

    @property
    def seconds(self) -> list[float]:
        """From the requester's answer to the provider's object, of each that came."""
        return [
            max(0.0, self._held[name, provider] - told)
            for name, (provider, told) in self._promised.items()
            if (name, provider) in self._held
        ]


class NotedObjects(MemoryObjects):
    """The objects of one cluster, whose instructions are noted as they are written."""

    def __init__(self, cluster: str, deliveries: Deliveries, clock: Callable[[], datetime]) -> None:
        super().__init__(clock)
        self._cluster = cluster
        self._deliveries = deliveries

    async def apply(self, wanted: Kind) -> Kind:
        return self._noted(await super().apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        kept = await super().set_status(wanted)
        return None if kept is None else self._noted(kept)

    def _noted(self, kept: Kind) -> Kind:
        if isinstance(kept, ProviderInstruction):
            self._deliveries.written(self._cluster, kept)
        return kept
