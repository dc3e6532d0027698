"""Tracks which instructions have reached their provider and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from kubelend.agent import provisions
from kubelend.sources.memory import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.objects import Kind, ProviderInstruction

Timer = Callable[[], float]


class DeliveryTracker:
    """All reservations of a run. The provider may be notified before the requester."""

    def __init__(self, timer: Timer = time.perf_counter) -> None:
        self._timer = timer
        self._reserved: dict[str, tuple[str, float]] = {}
        """Provider, and time of the requester's response, by reservation."""
        self._released: set[str] = set()
        self._held: dict[tuple[str, str], float] = {}
        """Time of the first ProviderInstruction by reservation and provider."""
        self._withdrawn: set[tuple[str, str]] = set()

    # -- requester

    def on_reserved(self, answer: bodies.Reservation) -> None:
        self._reserved[answer.id] = answer.target_cluster_id, self._timer()

    def on_released(self, reservation: str) -> None:
        self._released.add(reservation)

    # -- provider

    def on_instruction(self, cluster: str, found: ProviderInstruction) -> None:
        key = found.spec.reservation_name, cluster
        self._held.setdefault(key, self._timer())
        if found.status.phase == provisions.WITHDRAWN:
            self._withdrawn.add(key)

    # -- result

    @property
    def count(self) -> int:
        return len(self._reserved)

    @property
    def missed(self) -> int:
        """Number of holds and withdrawals that have not arrived."""
        keys = {name: (name, provider) for name, (provider, _) in self._reserved.items()}
        unheld = sum(key not in self._held for key in keys.values())
        return unheld + sum(keys.get(name) not in self._withdrawn for name in self._released)

    @property
    def latencies(self) -> list[float]:
        """Latencies from the requester's response to the provider's object."""
        return [
            max(0.0, self._held[name, provider] - answered)
            for name, (provider, answered) in self._reserved.items()
            if (name, provider) in self._held
        ]


class RecordingObjects(MemoryObjects):
    """In-memory objects of one cluster that record written ProviderInstructions."""

    def __init__(
        self, cluster: str, deliveries: DeliveryTracker, clock: Callable[[], datetime]
    ) -> None:
        super().__init__(clock)
        self._cluster = cluster
        self._deliveries = deliveries

    async def apply(self, wanted: Kind) -> Kind:
        return self._record(await super().apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        kept = await super().set_status(wanted)
        return None if kept is None else self._record(kept)

    def _record(self, kept: Kind) -> Kind:
        if isinstance(kept, ProviderInstruction):
            self._deliveries.on_instruction(self._cluster, kept)
        return kept
