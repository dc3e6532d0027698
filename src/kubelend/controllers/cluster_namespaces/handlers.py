"""Executes the requests that agents write into their cluster namespace, as the REST interface would.

`NamespaceReconciler` calls it and writes the response. Errors are those of the REST interface.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Final, NamedTuple

import msgspec
import structlog

from kubelend.broker import authorization, streams
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.service import Broker
from kubelend.broker.streams import Instruction, Side
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.controllers import labels
from kubelend.controllers.cluster_namespaces import plan
from kubelend.controllers.cluster_namespaces.plan import NamespaceCache
from kubelend.core import errors, lifecycle
from kubelend.core.audit_log import Actor
from kubelend.core.errors import Forbidden, InvalidInput, KubelendError, NotFound, Unavailable
from kubelend.core.lifecycle import FINAL, Reason
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.kube.client import Client
from kubelend.wire import bodies, cluster_namespaces, conversion, route
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.objects import AgentRequest, ProviderInstruction

log = structlog.get_logger("kubelend.cluster_namespaces")


SignGrant = Callable[[Record, ClusterId], Awaitable[str | None]]


class Dependencies(NamedTuple):
    client: Client
    broker: Broker
    terms: RequestLimits
    sessions: AgentSessions | None = None
    """Without it every agent of a cluster may send requests."""
    sign_grant: SignGrant | None = None
    """Signs the grants for the two sides of a reservation."""
    session_timeout: timedelta = timedelta(minutes=15)
    """After which an agent session without requests expires."""
    grant_keys: str = ""
    """The keys that verify grants, as the REST interface returns them."""


class RequestHandlers:
    """Executes the requests of one cluster."""

    def __init__(self, dependencies: Dependencies, cluster: ClusterId, namespace: str) -> None:
        self._broker = dependencies.broker
        self._terms = dependencies.terms
        self._sessions = dependencies.sessions
        self._sign_grant = dependencies.sign_grant
        self._grant_keys = dependencies.grant_keys
        self._cluster = cluster
        self._namespace = namespace

    def authorize(self, request: AgentRequest, *, claims: bool = True) -> None:
        """Reject a revoked cluster, and an agent while another agent of the cluster has the session."""
        labels.check_not_revoked(self._broker.members, self._cluster)
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
                    text, unfinished = request.arguments, authorization.unfinished(found)
                    longer = conversion.bounded_duration(text, self._terms) if text else None
                    return await self._broker.renew(unfinished, longer)
                case "release":
                    return await self._broker.release(found.id, Reason.BY_REQUESTER)
        raise InvalidInput(f"unknown verb for a reservation: {request.verb[:20]!r}")

    async def handle_instruction(self, obj: ProviderInstruction, request: AgentRequest) -> Record:
        lent = ReservationId(obj.spec.reservation_name)
        with self._as_cluster():
            self.authorize(request)
            match request.verb:
                case "acknowledge":
                    body = cluster_namespaces.acknowledgement_from_request(request)
                    return await authorization.acknowledge_hold(
                        self._broker, lent, self._cluster, body
                    )
                case "refuse":
                    return await authorization.refuse_hold(
                        self._broker, lent, self._cluster, request.arguments
                    )
        raise InvalidInput(f"unknown verb for a provider instruction: {request.verb[:20]!r}")

    async def handle_session(self, request: AgentRequest) -> str:
        """The response body for the named reservation as the REST interface returns it; else empty."""
        if request.verb == "keys":
            return self._grant_keys
        if request.verb not in ("read", "handshake") or not request.arguments:
            return ""
        found = await authorization.visible_to(
            self._broker, ReservationId(request.arguments), self._cluster
        )
        if request.verb == "read":
            return cluster_namespaces.body_text(conversion.from_reservation(found))
        return cluster_namespaces.body_text(await self._exchange_handshake(found, request))

    async def _exchange_handshake(
        self, found: Record, request: AgentRequest
    ) -> bodies.HandshakeResult:
        try:
            sent = msgspec.json.decode(request.handshake, type=bodies.Handshake)
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"handshake: {error}") from None
        peer = self._broker.handshakes.exchange(found, self._cluster, sent)
        grant = None if self._sign_grant is None else await self._sign_grant(found, self._cluster)
        return bodies.HandshakeResult(peer, grant or "")

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
        request = conversion.to_request(obj.spec, self._cluster, key, self._terms)
        return await self._broker.reserve(request)

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
        raise errors.reservation_not_found(obj.metadata.name)
    return ReservationId(response.reservation.id)


SESSION_CHECK_SECONDS = 15.0
"""Seconds between two checks whether the agent is still there."""


class AgentStream:
    """Use `start`; ends by `stop` or when the broker closes its subscription, and then calls `on_end`."""

    def __init__(
        self,
        dependencies: Dependencies,
        cluster: ClusterId,
        agent: str,
        on_end: Callable[[AgentStream], None],
        on_handshakes: Callable[[list[ReservationId]], None],
    ) -> None:
        """Also ends after a timeout without a request: no connection shows that the process died."""
        self.name = f"{agent or 'unnamed'}/{uuid.uuid4().hex[:12]}"
        self.agent = agent
        self._broker, self._sessions = dependencies.broker, dependencies.sessions
        self._timeout = dependencies.session_timeout
        self._cluster = cluster
        self._last_request_at = self._broker.clock()
        self._on_end = on_end
        self._on_handshakes = on_handshakes
        self._task: asyncio.Task[None] | None = None

    async def start(self, origin: str) -> None:
        """`IdentityInUse` while another agent is active, `NotReady` while the broker is not."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(origin, begun), name=f"session {self.name}")
        await begun

    def touch(self, agent: str) -> None:
        """Note a request, if it is from the agent of this session."""
        if agent == self.agent:
            self._last_request_at = self._broker.clock()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, origin: str, started: asyncio.Future[None]) -> None:
        sessions = self._sessions
        try:
            async with self._broker.stream(self._cluster, None) as opening:
                feed = opening.subscription
                with (
                    sessions.hold_open(self._cluster, self.agent, origin, feed)
                    if sessions is not None and self.agent
                    else nullcontext()
                ):
                    started.set_result(None)
                    while not feed.closed and not self._is_expired():
                        await feed.read(SESSION_CHECK_SECONDS)
                        if handshakes := feed.take_handshakes():
                            self._on_handshakes(handshakes)
        except KubelendError as error:
            if not started.done():
                started.set_exception(error)
                return
        finally:
            if not started.done():
                started.cancel()
        self._on_end(self)

    def _is_expired(self) -> bool:
        if self._broker.clock() - self._last_request_at < self._timeout:
            return False
        reason = "no request received"
        log.info("Agent session expired", session=self.name, cluster=self._cluster, reason=reason)
        return True
