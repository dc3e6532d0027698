"""Reservation objects in the cluster's namespace, by which a requester reserves.

An object is named after the idempotency key of its request, so a repeated request finds it.
"""

from __future__ import annotations

import contextlib

from kubelend.communicators import kube_asking, kube_bodies, kube_stream
from kubelend.communicators.kube_asking import Asker
from kubelend.core.errors import AlreadyExists, BrokerUnreachable, KeyReused, KubelendError
from kubelend.wire import bodies, mailboxes
from kubelend.wire.broker_objects import Reservation


class Requests:
    """Creates Reservation objects, and maps reservation IDs to them."""

    def __init__(self, asker: Asker) -> None:
        self.names: dict[str, str] = {}
        """Object names by reservation ID; a list is only read for IDs that are missing."""
        self._asker = asker

    async def placed(self, wanted: Reservation) -> Reservation:
        """The object of this request: a new one, or that of an earlier attempt."""
        slot, client = kube_asking.RESERVATIONS, self._asker.client
        while True:
            with contextlib.suppress(AlreadyExists), kube_asking.unreachable():
                return await client.create(slot.resource, wanted)
            found = await self._asker.find(slot, wanted.metadata.name)
            if found is None:
                continue
            if found.metadata.deletion_timestamp is not None:
                await self._asker.gone(slot, found)
            elif kube_bodies.asks_the_same(found, wanted):
                return await self._asked_again(found, wanted)
            elif found.status.response is None or found.status.response.body:
                raise KeyReused(
                    f"idempotency key {wanted.metadata.annotations[mailboxes.KEY]!r}"
                    " was used for another request",
                    hint="send the same request again, or use a new key",
                )
            else:
                await self._delete(found)

    async def _asked_again(self, found: Reservation, wanted: Reservation) -> Reservation:
        if not kube_asking.RESERVATIONS.is_answered(found):
            return found
        call = self._asker.question("reserve")
        name = wanted.metadata.name
        return await self._asker.ask(kube_asking.RESERVATIONS, name, call, {})

    async def outcome(self, found: Reservation) -> bodies.Reservation:
        """The result of a request. The object of a permanently rejected one is deleted."""
        try:
            instruction = mailboxes.instruction(kube_asking.granted(found.status.response))
        except KubelendError as refusal:
            if not refusal.retryable and found.status.response and not found.status.response.body:
                await self._delete(found)
            raise
        if instruction is None:
            raise BrokerUnreachable("the broker's response is empty")
        self.names[instruction.reservation.id] = found.metadata.name
        return instruction.reservation

    async def _delete(self, found: Reservation) -> None:
        with kube_asking.unreachable():
            await self._asker.client.delete(
                kube_asking.RESERVATIONS.resource,
                found.metadata.name,
                self._asker.namespace,
                uid=found.metadata.uid,
            )

    async def own(self) -> list[bodies.Instruction]:
        """Instructions for the reservations that this cluster has requested."""
        found = await self._asker.list(kube_asking.RESERVATIONS)
        instructions = {one.metadata.name: kube_stream.said(one) for one in found}
        self.names = {
            one.reservation.id: name for name, one in instructions.items() if one is not None
        }
        return [one for one in instructions.values() if one is not None]
