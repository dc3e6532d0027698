"""Broker calls of the requester. All are idempotent; responses go into the `ReservationCache`."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from kubelend.agent import asking, verdicts, wishes
from kubelend.agent.leases import ExpiryTracker
from kubelend.agent.ports import BrokerCommunicator
from kubelend.agent.reservations import BEFORE_ANY_UPDATE, UNFINISHED_PHASES, ReservationCache
from kubelend.agent.wishes import RequestState
from kubelend.core.errors import KubelendError, NotFound
from kubelend.wire import bodies
from kubelend.wire.objects import ResourceRequest, SentRequest

MAX_CONCURRENT_REQUESTS: Final = 32
"""Concurrent reservation requests. A broker that hangs must not use up all connections, which
releases need too."""

log = structlog.get_logger("kubelend.agent")


class ReservationClient:
    """One requester cluster."""

    def __init__(
        self,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        expiry: ExpiryTracker,
        cluster_id: str,
    ) -> None:
        self._communicator = communicator
        self._reservations = reservations
        self._expiry = expiry
        self._cluster_id = cluster_id
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def reserve(
        self, found: ResourceRequest, sent: SentRequest, *, is_first: bool
    ) -> bodies.Reservation:
        """Request a reservation. Only on the first attempt is the returned reservation known to be
        new.
        """
        async with self._request_slots:
            body = await self._request(found, sent)
        if is_first:
            self._expiry.confirm(body)
        return body

    async def fetch(self, reservation: str) -> bodies.Reservation | None:
        """The latest state; None if the broker does not know it."""
        return await asking.fetch_latest(self._communicator, self._reservations, reservation)

    async def renew(self, reservation: str) -> bodies.Reservation:
        asked_at = self._reservations.sequence()
        body = await asking.with_timeout(self._communicator.renew(reservation))
        self._expiry.confirm(body)
        return self.cache(body, asked_at)

    async def release(self, found: ResourceRequest) -> str:
        """Release the object's reservation. Returns its ID, empty if there was none."""
        reservation = await self._held_reservation(found)
        if reservation:
            await self._release(reservation)
        return reservation

    def cache(
        self, body: bodies.Reservation, requested_at: int = BEFORE_ANY_UPDATE
    ) -> bodies.Reservation:
        """Cache a response; returns the cached state, which may be newer."""
        self._reservations.put(body, requested_at)
        return self._reservations.find(body.id) or body

    async def _request(self, found: ResourceRequest, sent: SentRequest) -> bodies.Reservation:
        key = wishes.idempotency_key(self._cluster_id, found.metadata.uid, sent.generation)
        return await asking.with_timeout(self._communicator.request(sent.request, key))

    async def _held_reservation(self, found: ResourceRequest) -> str:
        """The ID of the reservation that the object holds, as far as is known. Empty if there is
        none.
        """
        stage, name, asked = (
            wishes.request_state(found),
            found.status.reservation_name,
            found.status.asked,
        )
        if stage is RequestState.BOUND:
            known = self._reservations.find(name)
            return name if known is None or known.status.phase in UNFINISHED_PHASES else ""
        if stage is RequestState.REQUESTED and asked is not None:
            return await self._recover_reservation(found, asked)
        return ""

    async def _recover_reservation(self, found: ResourceRequest, sent: SentRequest) -> str:
        """The response may have been lost. Repeating the request finds the reservation, because of
        its key.
        """
        try:
            return (await self._request(found, sent)).id
        except KubelendError as error:
            if verdicts.is_transient(error):
                raise
            return ""

    async def _release(self, reservation: str) -> None:
        asked_at = self._reservations.sequence()
        try:
            self.cache(await asking.with_timeout(self._communicator.release(reservation)), asked_at)
        except NotFound:
            self._reservations.remove(reservation)
        except KubelendError as error:
            if verdicts.is_transient(error):
                raise
            # The object must not be blocked for ever; the reservation ends by its expiry.
            log.warning(
                "Release failed permanently; reservation will expire",
                reservation=reservation,
                error=str(error),
            )
