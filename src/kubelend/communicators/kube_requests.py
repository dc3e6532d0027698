"""Reservation objects in the cluster's namespace, by which a requester reserves.

An object is named after the idempotency key of its request, so a repeated request finds it.
"""

from __future__ import annotations

import contextlib

from kubelend.communicators import kube_asking, kube_bodies, kube_stream
from kubelend.communicators.kube_asking import ObjectCaller
from kubelend.core.errors import AlreadyExists, BrokerUnreachable, KeyReused, KubelendError
from kubelend.wire import bodies, mailboxes
from kubelend.wire.broker_objects import Reservation


class ReservationRequests:
    """Creates Reservation objects, and maps reservation IDs to them."""

    def __init__(self, caller: ObjectCaller) -> None:
        self.object_names: dict[str, str] = {}
        """Object names by reservation ID; a list is only read for IDs that are missing."""
        self._caller = caller

    async def create_or_find(self, wanted: Reservation) -> Reservation:
        """The object of this request: a new one, or that of an earlier attempt."""
        slot, client = kube_asking.RESERVATION_SLOT, self._caller.client
        while True:
            with contextlib.suppress(AlreadyExists), kube_asking.as_unreachable():
                return await client.create(slot.resource, wanted)
            found = await self._caller.find(slot, wanted.metadata.name)
            if found is None:
                continue
            if found.metadata.deletion_timestamp is not None:
                await self._caller.wait_deleted(slot, found)
            elif kube_bodies.is_same_request(found, wanted):
                return await self._repeat_request(found, wanted)
            elif found.status.response is None or found.status.response.body:
                raise KeyReused(
                    f"idempotency key {wanted.metadata.annotations[mailboxes.IDEMPOTENCY_ANNOTATION]!r}"
                    " was used for another request",
                    hint="send the same request again, or use a new key",
                )
            else:
                await self._delete(found)

    async def _repeat_request(self, found: Reservation, wanted: Reservation) -> Reservation:
        if not kube_asking.RESERVATION_SLOT.has_response(found):
            return found
        call = self._caller.new_request("reserve")
        name = wanted.metadata.name
        return await self._caller.call(kube_asking.RESERVATION_SLOT, name, call, {})

    async def outcome(self, found: Reservation) -> bodies.Reservation:
        """The result of a request. The object of a permanently rejected one is deleted."""
        try:
            instruction = mailboxes.instruction_from_response(
                kube_asking.raise_for_error(found.status.response)
            )
        except KubelendError as refusal:
            if not refusal.retryable and found.status.response and not found.status.response.body:
                await self._delete(found)
            raise
        if instruction is None:
            raise BrokerUnreachable("the broker's response is empty")
        self.object_names[instruction.reservation.id] = found.metadata.name
        return instruction.reservation

    async def _delete(self, found: Reservation) -> None:
        with kube_asking.as_unreachable():
            await self._caller.client.delete(
                kube_asking.RESERVATION_SLOT.resource,
                found.metadata.name,
                self._caller.namespace,
                uid=found.metadata.uid,
            )

    async def list_own(self) -> list[bodies.Instruction]:
        """Instructions for the reservations that this cluster has requested."""
        found = await self._caller.list(kube_asking.RESERVATION_SLOT)
        instructions = {one.metadata.name: kube_stream.latest_instruction(one) for one in found}
        self.object_names = {
            one.reservation.id: name for name, one in instructions.items() if one is not None
        }
        return [one for one in instructions.values() if one is not None]
