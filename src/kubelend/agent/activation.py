"""Activates a reservation on the broker once its peering is ready and its provider has acknowledged it.

An active reservation cannot be refused, so the provider decides first, however fast the peering is.
Some providers never acknowledge; the reservation is activated after a deadline.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final, NamedTuple

import structlog

from kubelend.agent import asking
from kubelend.agent.ports import BrokerCommunicator
from kubelend.agent.reservations import ReservationCache
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies
from kubelend.wire.objects import ReservationInstruction

log = structlog.get_logger("kubelend.agent")

ACKNOWLEDGE_TIMEOUT: Final = timedelta(seconds=30)
"""How long to wait for the provider's acknowledgement after the peering is ready."""


class Activator:
    """Activates reservations that the cache has as Reserved."""

    def __init__(
        self,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        acknowledge_timeout: timedelta,
    ) -> None:
        self._communicator = communicator
        self._reservations = reservations
        self._acknowledge_timeout = acknowledge_timeout.total_seconds()
        self._ready_since: dict[str, _ReadySince] = {}

    def acknowledgement_wait(self, found: ReservationInstruction) -> timedelta:
        """How long to wait for the provider's acknowledgement; zero if there is no need to."""
        body = self._unactivated(found)
        if body is None or body.status.acknowledged_at is not None:
            return timedelta()
        now = asyncio.get_running_loop().time()
        ready = self._ready_since.get(found.key)
        if ready is None or ready.cluster != body.target_cluster_id:
            ready = self._ready_since[found.key] = _ReadySince(body.target_cluster_id, now)
        return timedelta(seconds=max(ready.since + self._acknowledge_timeout - now, 0))

    async def activate(self, found: ReservationInstruction) -> None:
        body = self._unactivated(found)
        if body is not None:
            asked_at = self._reservations.sequence()
            used = await asking.with_timeout(self._communicator.activate(body.id))
            self._reservations.put(used, asked_at)
            log.info("Reservation activated", reservation=body.id, cluster=body.target_cluster_id)

    def forget(self, key: str) -> None:
        """The object has nothing to activate any more."""
        self._ready_since.pop(key, None)

    def _unactivated(self, found: ReservationInstruction) -> bodies.Reservation | None:
        known = self._reservations.find(found.spec.reservation_name)
        is_reserved = known is not None and known.status.phase == Phase.RESERVED.value
        return known if is_reserved else None


class _ReadySince(NamedTuple):
    cluster: str
    since: float
    """In the event loop's time."""
