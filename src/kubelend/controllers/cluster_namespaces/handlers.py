"""Executes the requests that agents write into their cluster namespace, as the REST interface would.

`NamespaceReconciler` calls it and writes the response. Errors are those of the REST interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from kubelend.broker import authorization, streams
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.service import Broker
from kubelend.broker.streams import Instruction, Side
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.controllers.cluster_namespaces import plan
from kubelend.controllers.cluster_namespaces.plan import NamespaceCache
from kubelend.core import lifecycle
from kubelend.core.audit_log import Actor
from kubelend.core.errors import (
    Forbidden,
    InvalidInput,
    KubelendError,
    NotFound,
    Revoked,
    Unavailable,
    reservation_not_found,
)
from kubelend.core.lifecycle import FINAL, Reason
from kubelend.core.members import MembershipStatus, member_id
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.wire import bodies, cluster_namespaces, conversion, route
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.objects import AgentRequest, ProviderInstruction

PROVIDER_SIDE: Final = Side.PROVIDER
REQUESTER_SIDE: Final = Side.REQUESTER


class RequestHandlers:
    """Executes the requests of one cluster."""

    def __init__(
        self,
        broker: Broker,
        terms: RequestLimits,
        sessions: AgentSessions | None,
        cluster: ClusterId,
        namespace: str,
    ) -> None:
        self._broker = broker
        self._terms = terms
        self._sessions = sessions
        self._cluster = cluster
        self._namespace = namespace

    def authorize(self, request: AgentRequest, *, claims: bool = True) -> None:
        """Reject a revoked cluster, and an agent while another agent of the cluster has the session."""
        member = self._broker.members.members.get(member_id(lifecycle.Role.CLUSTER, self._cluster))
        if member is not None and member.standing is MembershipStatus.REVOKED:
            raise Revoked(
                f"cluster {self._cluster} was revoked: {member.reason or 'no reason given'}",
                hint="ask an administrator",
            )
        if self._sessions is None or not request.agent:
            return
        if claims:
            origin = f"in namespace {self._namespace}"
            self._sessions.claim(self._cluster, request.agent, origin)
        else:
            self._sessions.touch(self._cluster, request.agent)

    async def handle_advertisement(
        self, obj: ClusterAdvertisement, request: AgentRequest
    ) -> tuple[bodies.Advertisement, dict[str, object]]:
        """The response body, and the object's status."""
        with self._as_cluster():
            self.authorize(request)
            body = conversion.advertisement_from_spec(obj.spec)
            authorization.check_namespace_cluster(body.cluster_id, self._cluster)
            offer = conversion.to_advertisement(body, self._cluster, self._broker.clock())
            view, _ = await self._broker.advertise(offer)
        now = self._broker.clock()
        status = conversion.from_cluster_status(
            view.cluster, view.reserved, view.reservation_count, view.effective_policy, now
        )
        fields_of_status = msgspec.to_builtins(status)
        fields = {name: fields_of_status.get(name) for name in _STATUS_FIELDS}
        return conversion.published_advertisement(body, view.cluster, view.reserved), fields

    async def handle_reservation(self, obj: Reservation, request: AgentRequest) -> Record:
        with self._as_cluster():
            self.authorize(request)
            if request.verb == "reserve":
                return await self._reserve(obj)
            found = await authorization.owned_by(self._broker, _reservation_id(obj), self._cluster)
            match request.verb:
                case "activate":
                    return await self._broker.activate(authorization.unfinished(found))
                case "renew":
                    return await self._renew(found, request.arguments)
                case "release":
                    return await self._broker.release(found.id, Reason.BY_REQUESTER)
        raise InvalidInput(f"unknown verb for a reservation: {request.verb[:20]!r}")

    async def handle_instruction(self, obj: ProviderInstruction, request: AgentRequest) -> Record:
        lent = ReservationId(obj.spec.reservation_name)
        with self._as_cluster():
            self.authorize(request)
            match request.verb:
                case "acknowledge":
                    return await authorization.acknowledge_hold(self._broker, lent, self._cluster)
                case "refuse":
                    return await authorization.refuse_hold(
                        self._broker, lent, self._cluster, request.arguments
                    )
        raise InvalidInput(f"unknown verb for a provider instruction: {request.verb[:20]!r}")

    async def handle_read(self, request: AgentRequest) -> str:
        """The named reservation as the REST interface returns it, also from the archive."""
        if request.verb != "read" or not request.arguments:
            return ""
        found = await authorization.visible_to(
            self._broker, ReservationId(request.arguments), self._cluster
        )
        return cluster_namespaces.body_text(conversion.from_reservation(found))

    async def release_for_deleted(self, obj: Reservation, cache: NamespaceCache) -> None:
        """Release the reservation of an object, if it is not finished."""
        found = await self._reservation_of_object(obj, cache)
        if found is not None and found.phase not in FINAL:
            with self._as_cluster():
                await self._broker.release(found.id, Reason.DELETED)

    async def _reserve(self, obj: Reservation) -> Record:
        """A known reservation counts, also after the ledger has dropped the idempotency key."""
        if obj.spec.requester_id:
            authorization.check_namespace_cluster(
                obj.spec.requester_id, self._cluster, "requesterID"
            )
        if plan.instruction_of(obj) is not None:
            return await authorization.owned_by(self._broker, _reservation_id(obj), self._cluster)
        key = route.check_idempotency_key(plan.idempotency_key(obj))
        body = conversion.request_from_spec(obj.spec)
        request = conversion.to_request(body, self._cluster, key, self._terms)
        return await self._broker.reserve(request)

    async def _renew(self, found: Record, text: str) -> Record:
        longer = conversion.bounded_duration(text, self._terms) if text else None
        return await self._broker.renew(authorization.unfinished(found), longer)

    async def _reservation_of_object(
        self, obj: Reservation, cache: NamespaceCache
    ) -> Record | None:
        """The reservation of the object; without a response, by key, unless another object shows it."""
        if plan.instruction_of(obj) is not None:
            try:
                return await authorization.owned_by(
                    self._broker, _reservation_id(obj), self._cluster
                )
            except (NotFound, Forbidden):  # of the namespace's previous cluster
                return None
        records = await self._broker.read(lambda ledger: list(ledger.by_cluster(self._cluster)))
        mine = (one for one in records if one.requester == self._cluster)
        found = next((one for one in mine if plan.is_object_of(obj, one)), None)
        return None if found is None or cache.has_other_object(found, obj) else found

    @contextmanager
    def _as_cluster(self) -> Iterator[None]:
        """Attribute audit records to the cluster and its namespace."""
        actor = Actor(self._cluster, lifecycle.Role.CLUSTER, f"namespace {self._namespace}")
        before = CURRENT_ACTOR.set(actor)
        try:
            yield
        finally:
            CURRENT_ACTOR.reset(before)


def as_retryable(error: KubelendError) -> KubelendError:
    """A failure to write the namespace is no rejection of the request."""
    if error.retryable:
        return error
    return Unavailable(f"the cluster namespace cannot be updated: {error}")


def instruction_for_side(cluster: ClusterId, record: Record, side: Side) -> Instruction | None:
    """The instruction for a cluster on one side of a reservation; None if it is not on that side."""
    found = streams.instructions_for(cluster, record)
    return next((one for one in found if one.side is side), None)


_STATUS_FIELDS: Final = (
    *("phase", "active", "score", "message", "lastUpdateTime", "validUntil"),
    *("cordonReason", "reservations"),
)


def _reservation_id(obj: Reservation) -> ReservationId:
    response = plan.instruction_of(obj)
    if response is None:
        raise reservation_not_found(obj.metadata.name)
    return ReservationId(response.reservation.id)
