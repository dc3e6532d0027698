"""What the requester says to the broker. Every call may be repeated after any failure, and does no more then.

What the broker answers goes into `agent.reservations`, like all that it says.
"""

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
"""Questions for which answers are waited at once: a broker that hangs must not take up all connections,
which those need who give something back."""

log = structlog.get_logger("kubelend.agent")


class Borrower:
    """One cluster, as it borrows."""

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
        """Reserve. Only of the first try can one be sure that what comes back was made just now."""
        async with self._asking:
            body = await self._request(found, asked)
        if is_first:
            self._leases.confirm(body)
        return body

    async def find(self, reservation: str) -> bodies.Reservation | None:
        """The broker's word; None if it knows none."""
        return await asking.newest(self._communicator, self._reservations, reservation)

    async def renew(self, reservation: str) -> bodies.Reservation:
        asked_at = self._reservations.now()
        body = await asking.bounded(self._communicator.renew(reservation))
        self._leases.confirm(body)
        return self.learn(body, asked_at)

    async def withdraw(self, found: ResourceRequest) -> None:
        """Have the broker hold nothing for it."""
        reservation = await self._held(found)
        if reservation:
            await self._release(reservation)

    def learn(self, body: bodies.Reservation, asked_at: int = LONG_AGO) -> bodies.Reservation:
        """Take an answer in; returns what is known then, which may be newer."""
        self._reservations.put(body, asked_at)
        return self._reservations.find(body.id) or body

    async def _request(self, found: ResourceRequest, asked: Asked) -> bodies.Reservation:
        key = wishes.key(self._cluster_id, found.metadata.uid, asked.generation)
        return await asking.bounded(self._communicator.request(asked.request, key))

    async def _held(self, found: ResourceRequest) -> str:
        """The ID of what is held for it, as far as is known. Empty if nothing is."""
        stage, name, asked = wishes.stage(found), found.status.reservation_name, found.status.asked
        if stage is Stage.BOUND:
            known = self._reservations.find(name)
            return name if known is None or known.status.phase in OPEN else ""
        if stage is Stage.ASKING and asked is not None:
            return await self._learned_again(found, asked)
        return ""

    async def _learned_again(self, found: ResourceRequest, asked: Asked) -> str:
        """An answer may have been lost. Only the same question can tell: with its key it is no new one."""
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
            # Nothing may hang for ever, neither the object nor what it has: that ends by itself.
            log.warning("left to expire", reservation=reservation, problem=str(error))
