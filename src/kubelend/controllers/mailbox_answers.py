"""Executes the requests that agents write into their cluster namespace, as the REST interface would.

`NamespaceReconciler` calls it and writes the response. Errors are those of the REST interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from kubelend.broker import instructions, parties
from kubelend.broker.instructions import Instruction, Side
from kubelend.broker.service import Broker
from kubelend.broker.speakers import Speakers
from kubelend.broker.writer import ACTOR
from kubelend.controllers import mailbox_plans, specs
from kubelend.controllers.mailbox_shelves import Shelf
from kubelend.core import roles
from kubelend.core.errors import (
    Forbidden,
    InvalidInput,
    KubelendError,
    NotFound,
    Revoked,
    Unavailable,
    no_reservation,
)
from kubelend.core.journal import Actor
from kubelend.core.lifecycle import FINAL, Reason
from kubelend.core.members import Standing, member_id
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.wire import bodies, conversion, mailboxes, route
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.conversion import Terms
from kubelend.wire.objects import ProviderInstruction, Question

PROVIDER: Final = Side.PROVIDER
REQUESTER: Final = Side.REQUESTER


class Answers:
    """Executes the requests of one cluster."""

    def __init__(
        self,
        broker: Broker,
        terms: Terms,
        speakers: Speakers | None,
        cluster: ClusterId,
        namespace: str,
    ) -> None:
        self._broker = broker
        self._terms = terms
        self._speakers = speakers
        self._cluster = cluster
        self._namespace = namespace

    def admit(self, question: Question, *, speaks: bool = True) -> None:
        """Reject a revoked cluster, and an agent while another agent of the cluster has the session."""
        member = self._broker.registry.members.get(member_id(roles.Role.CLUSTER, self._cluster))
        if member is not None and member.standing is Standing.REVOKED:
            raise Revoked(
                f"cluster {self._cluster} was revoked: {member.reason or 'no reason given'}",
                hint="ask an administrator",
            )
        if self._speakers is None or not question.agent:
            return
        if speaks:
            origin = f"in namespace {self._namespace}"
            self._speakers.speak(self._cluster, question.agent, origin)
        else:
            self._speakers.hear(self._cluster, question.agent)

    async def advertisement(
        self, seen: ClusterAdvertisement, question: Question
    ) -> tuple[bodies.Advertisement, dict[str, object]]:
        """The response body, and the object's status."""
        with self._acting():
            self.admit(question)
            body = specs.advertisement(seen.spec)
            parties.check_owner(body.cluster_id, self._cluster)
            offer = conversion.to_advertisement(body, self._cluster, self._broker.clock())
            view, _ = await self._broker.advertise(offer)
        now = self._broker.clock()
        status = conversion.from_cluster_status(
            view.cluster, view.reserved, view.lent, view.holds, now
        )
        fields_of_status = msgspec.to_builtins(status)
        fields = {name: fields_of_status.get(name) for name in _SHOWN}
        return conversion.accepted(body, view.cluster, view.reserved), fields

    async def reservation(self, seen: Reservation, question: Question) -> Record:
        with self._acting():
            self.admit(question)
            if question.verb == "reserve":
                return await self._reserve(seen)
            found = await parties.owned(self._broker, _told(seen), self._cluster)
            match question.verb:
                case "activate":
                    return await self._broker.activate(parties.ongoing(found))
                case "renew":
                    return await self._renew(found, question.arguments)
                case "release":
                    return await self._broker.release(found.id, Reason.BY_REQUESTER)
        raise InvalidInput(f"unknown verb for a reservation: {question.verb[:20]!r}")

    async def instruction(self, seen: ProviderInstruction, question: Question) -> Record:
        lent = ReservationId(seen.spec.reservation_name)
        with self._acting():
            self.admit(question)
            match question.verb:
                case "acknowledge":
                    return await parties.acknowledge(self._broker, lent, self._cluster)
                case "refuse":
                    return await parties.refuse(
                        self._broker, lent, self._cluster, question.arguments
                    )
        raise InvalidInput(f"unknown verb for a provider instruction: {question.verb[:20]!r}")

    async def read(self, question: Question) -> str:
        """The named reservation as the REST interface returns it, also from the archive."""
        if question.verb != "read" or not question.arguments:
            return ""
        found = await parties.visible(
            self._broker, ReservationId(question.arguments), self._cluster
        )
        return mailboxes.text(conversion.from_reservation(found))

    async def give_back(self, seen: Reservation, shelf: Shelf) -> None:
        """Release the reservation of an object, if it is not finished."""
        found = await self._standing_for(seen, shelf)
        if found is not None and found.phase not in FINAL:
            with self._acting():
                await self._broker.release(found.id, Reason.DELETED)

    async def _reserve(self, seen: Reservation) -> Record:
        """A known reservation counts, also after the ledger has dropped the idempotency key."""
        if seen.spec.requester_id:
            parties.check_owner(seen.spec.requester_id, self._cluster, "requesterID")
        if mailbox_plans.instruction(seen) is not None:
            return await parties.owned(self._broker, _told(seen), self._cluster)
        key = route.checked_key(mailbox_plans.key_of(seen))
        body = specs.request(seen.spec)
        request = conversion.to_request(body, self._cluster, key, self._terms)
        return await self._broker.reserve(request)

    async def _renew(self, found: Record, text: str) -> Record:
        longer = conversion.bounded_duration(text, self._terms) if text else None
        return await self._broker.renew(parties.ongoing(found), longer)

    async def _standing_for(self, seen: Reservation, shelf: Shelf) -> Record | None:
        """The reservation of the object; without a response, by key, unless another object shows it."""
        if mailbox_plans.instruction(seen) is not None:
            try:
                return await parties.owned(self._broker, _told(seen), self._cluster)
            except (NotFound, Forbidden):  # of the namespace's previous cluster
                return None
        records = await self._broker.read(lambda ledger: list(ledger.touching(self._cluster)))
        mine = (one for one in records if one.requester == self._cluster)
        found = next((one for one in mine if mailbox_plans.stands_for(seen, one)), None)
        return None if found is None or shelf.has_other(found, seen) else found

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Attribute audit records to the cluster and its namespace."""
        actor = Actor(self._cluster, roles.Role.CLUSTER, f"namespace {self._namespace}")
        before = ACTOR.set(actor)
        try:
            yield
        finally:
            ACTOR.reset(before)


def passing(problem: KubelendError) -> KubelendError:
    """A failure to write the namespace is no rejection of the request."""
    if problem.retryable:
        return problem
    return Unavailable(f"the cluster namespace cannot be updated: {problem}")


def part(cluster: ClusterId, record: Record, side: Side) -> Instruction | None:
    """The instruction for a cluster on one side of a reservation; None if it is not on that side."""
    found = instructions.for_cluster(cluster, record)
    return next((one for one in found if one.side is side), None)


_SHOWN: Final = (
    *("phase", "active", "score", "message", "lastUpdateTime", "validUntil"),
    *("cordonReason", "reservations"),
)


def _told(seen: Reservation) -> ReservationId:
    response = mailbox_plans.instruction(seen)
    if response is None:
        raise no_reservation(seen.metadata.name)
    return ReservationId(response.reservation.id)
