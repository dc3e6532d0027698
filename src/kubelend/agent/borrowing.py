"""Broker calls of the requester. All are idempotent; responses go into the `ReservationCache`."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from kubelend.agent import asking, verdicts, wishes
from kubelend.agent.leases import Leases
from kubelend.agent.ports import BrokerCommunicator
from kubelend.agent.reservations import LONG_AGO, OPEN, Reservations
from kubelend.agent.wishes import Stage
from kubelend.core.errors import KubelendError, NotFound
from kubelend.wire import bodies
from kubelend.wire.objects import Asked, ResourceRequest

ASKED_AT_A_TIME: Final = 32
"""Concurrent reservation requests. A broker that hangs must not use up all connections, which
releases need too."""

log = structlog.get_logger("kubelend.agent")


class Borrower:
    """One requester cluster."""

    def __init__(
        self,
        communicator: BrokerCommunicator,
        reservations: Reservations,
        leases: Leases,
        cluster_id: str,
    ) -> None:
        self._communicator = communicator
        self._reservations = reservations
        self._leases = leases
        self._cluster_id = cluster_id
        self._asking = asyncio.Semaphore(ASKED_AT_A_TIME)

    async def ask(
        self, found: ResourceRequest, asked: Asked, *, is_first: bool
    ) -> bodies.Reservation:
        """Request a reservation. Only on the first attempt is the returned reservation known to be
        new.
        """
        async with self._asking:
            body = await self._request(found, asked)
        if is_first:
            self._leases.confirm(body)
        return body

    async def find(self, reservation: str) -> bodies.Reservation | None:
        """The latest state; None if the broker does not know it."""
        return await asking.newest(self._communicator, self._reservations, reservation)

    async def renew(self, reservation: str) -> bodies.Reservation:
        asked_at = self._reservations.now()
        body = await asking.bounded(self._communicator.renew(reservation))
        self._leases.confirm(body)
        return self.learn(body, asked_at)

    async def withdraw(self, found: ResourceRequest) -> str:
        """Release the object's reservation. Returns its ID, empty if there was none."""
        reservation = await self._held(found)
        if reservation:
            await self._release(reservation)
        return reservation

    def learn(self, body: bodies.Reservation, asked_at: int = LONG_AGO) -> bodies.Reservation:
        """Cache a response; returns the cached state, which may be newer."""
        self._reservations.put(body, asked_at)
        return self._reservations.find(body.id) or body

    async def _request(self, found: ResourceRequest, asked: Asked) -> bodies.Reservation:
        key = wishes.key(self._cluster_id, found.metadata.uid, asked.generation)
        return await asking.bounded(self._communicator.request(asked.request, key))

    async def _held(self, found: ResourceRequest) -> str:
        """The ID of the reservation that the object holds, as far as is known. Empty if there is
        none.
        """
        stage, name, asked = wishes.stage(found), found.status.reservation_name, found.status.asked
        if stage is Stage.BOUND:
            known = self._reservations.find(name)
            return name if known is None or known.status.phase in OPEN else ""
        if stage is Stage.ASKING and asked is not None:
            return await self._learned_again(found, asked)
        return ""

    async def _learned_again(self, found: ResourceRequest, asked: Asked) -> str:
        """The response may have been lost. Repeating the request finds the reservation, because of
        its key.
        """
        try:
            return (await self._request(found, asked)).id
        except KubelendError as error:
            if verdicts.is_passing(error):
                raise
            return ""

    async def _release(self, reservation: str) -> None:
        asked_at = self._reservations.now()
        try:
            self.learn(await asking.bounded(self._communicator.release(reservation)), asked_at)
        except NotFound:
            self._reservations.forget(reservation)
        except KubelendError as error:
            if verdicts.is_passing(error):
                raise
            # The object must not be blocked for ever; the reservation ends by its expiry.
            log.warning(
                "Release failed permanently; reservation will expire",
                reservation=reservation,
                error=str(error),
            )
