"""Tells the broker that borrowed capacity is used, once the provider has agreed to it. Part of the peering.

A provider cannot refuse any more what is used: the lender's word comes first, however quickly the clusters
are joined. There are providers that never say it; they have had their time when the deadline is over.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final, NamedTuple

from kubelend.agent import asking
from kubelend.agent.ports import BrokerCommunicator
from kubelend.agent.reservations import Reservations
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies
from kubelend.wire.objects import ReservationInstruction

ANSWERED_WITHIN: Final = timedelta(seconds=30)
"""From when it could be used."""


class Activation:
    """By the broker's own newest word one sees whether it knows."""

    def __init__(
        self,
        communicator: BrokerCommunicator,
        reservations: Reservations,
        answered_within: timedelta,
    ) -> None:
        self._communicator = communicator
        self._reservations = reservations
        self._answered_within = answered_within.total_seconds()
        self._ready: dict[str, _Ready] = {}

    def patience(self, found: ReservationInstruction) -> timedelta:
        """For how long the provider of what is ready may still answer; zero if it need not."""
        body = self._to_activate(found)
        if body is None or body.status.acknowledged_at is not None:
            return timedelta()
        now = asyncio.get_running_loop().time()
        ready = self._ready.get(found.key)
        if ready is None or ready.cluster != body.target_cluster_id:
            ready = self._ready[found.key] = _Ready(body.target_cluster_id, now)
        return timedelta(seconds=max(ready.since + self._answered_within - now, 0))

    async def activate(self, found: ReservationInstruction) -> None:
        """Have the broker know that it is used."""
        body = self._to_activate(found)
        if body is not None:
            asked_at = self._reservations.now()
            used = await asking.bounded(self._communicator.activate(body.id))
            self._reservations.put(used, asked_at)

    def forget(self, key: str) -> None:
        """There is nothing to activate for this object any more."""
        self._ready.pop(key, None)

    def _to_activate(self, found: ReservationInstruction) -> bodies.Reservation | None:
        known = self._reservations.find(found.spec.reservation_name)
        is_reserved = known is not None and known.status.phase == Phase.RESERVED.value
        return known if is_reserved else None


class _Ready(NamedTuple):
    cluster: str
    since: float
    """By the loop's time."""
