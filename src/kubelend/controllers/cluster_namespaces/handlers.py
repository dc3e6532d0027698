"""Executes what agents write into their cluster namespace, as the REST interface would.

`NamespaceReconciler` calls it and writes the result. Errors are those of the REST interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.broker import authorization, streams
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.service import Broker
from kubelend.broker.streams import Instruction, Side
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.controllers import labels, reservation_plan
from kubelend.controllers.cluster_namespaces import plan
from kubelend.controllers.cluster_namespaces.plan import NamespaceCache
from kubelend.controllers.reservation_plan import ActionKind
from kubelend.core import errors, lifecycle
from kubelend.core.audit_log import Actor
from kubelend.core.errors import Forbidden, KubelendError, NotFound
from kubelend.core.lifecycle import FINAL, Reason
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.kube.client import Client
from kubelend.wire import bodies, cluster_namespaces, conversion, route
from kubelend.wire.broker_objects import ClusterAdvertisement, ClusterSessionSpec, Reservation
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.objects import ProviderInstruction, SentHandshake

log = structlog.get_logger("kubelend.cluster_namespaces")

Fields = dict[str, Any]
SignGrant = Callable[[Record, ClusterId], Awaitable[str | None]]


class Dependencies(NamedTuple):
    client: Client
    broker: Broker
    terms: RequestLimits
    sessions: AgentSessions
    """In which an agent that watches its namespace counts as the active one, also for the REST interface."""
    sign_grant: SignGrant | None = None
    """Signs the grants for the two sides of a reservation."""
    session_timeout: timedelta = timedelta(minutes=15)
    """After which the watch of an agent that writes nothing expires."""
    grant_keys: bodies.KeySet | None = None
    """The keys that verify grants."""


class ClusterHandlers:
    """Executes what one cluster has written into its namespace."""

    def __init__(self, dependencies: Dependencies, cluster: ClusterId, namespace: str) -> None:
        self._broker = dependencies.broker
        self._terms = dependencies.terms
        self._sign_grant = dependencies.sign_grant
        self._cluster = cluster
        self._namespace = namespace

    def check_not_revoked(self) -> None:
        labels.check_not_revoked(self._broker.members, self._cluster)

    async def advertise(self, obj: ClusterAdvertisement) -> Fields:
        """Returns the fields of the status."""
        self.check_not_revoked()
        with self._as_cluster():
            body = conversion.advertisement_from_spec(obj.spec)
            authorization.check_namespace_cluster(body.cluster_id, self._cluster)
            offer = conversion.to_advertisement(body, self._cluster, self._broker.clock())
            view, _ = await self._broker.advertise(offer)
        now = self._broker.clock()
        status = conversion.from_cluster_status(
            view.cluster, view.reserved, view.reservation_count, view.effective_policy, now
        )
        amounts = conversion.published_advertisement(body, view.cluster, view.reserved).resources
        shown: Fields = msgspec.to_builtins(status)
        fields = {name: shown.get(name) for name in _STATUS_FIELDS}
        return fields | {
            "reserved": amounts.reserved and cluster_namespaces.replacement(amounts.reserved),
            "available": amounts.available and cluster_namespaces.replacement(amounts.available),
        }

    async def apply_reservation(self, obj: Reservation) -> Record:
        """Do what the spec asks for: reserve, release, activate, renew. Idempotent."""
        self.check_not_revoked()
        with self._as_cluster():
            if plan.instruction_of(obj) is None:
                return await self._reserve(obj)
            found = await authorization.owned_by(self._broker, _reservation_id(obj), self._cluster)
            while (action := reservation_plan.wanted_change(obj, found)) is not None:
                match action.kind:
                    case ActionKind.RELEASE:
                        found = await self._broker.release(found.id, action.reason)
                    case ActionKind.ACTIVATE:
                        found = await self._broker.activate(found.id)
                    case _ if (renewal := obj.spec.renewal) is not None:
                        longer = conversion.renewal_duration(renewal.duration, self._terms)
                        found = await self._broker.renew(found.id, longer)
                        obj = replace(obj, status=replace(obj.status, renew_time=renewal.time))
            return found

    async def apply_report(self, obj: ProviderInstruction) -> Record:
        """Acknowledge or refuse the hold, as the provider's status says. Idempotent."""
        lent = ReservationId(obj.spec.reservation_name)
        self.check_not_revoked()
        with self._as_cluster():
            match obj.status.phase:
                case "Held":
                    body = bodies.AcknowledgeRequest(plan.hold_report(obj))
                    return await authorization.acknowledge_hold(
                        self._broker, lent, self._cluster, body
                    )
                case "Refused":
                    return await authorization.refuse_hold(
                        self._broker, lent, self._cluster, obj.status.message
                    )
        return await authorization.visible_to(self._broker, lent, self._cluster)

    def pass_handshake(
        self, record: Record, sent: SentHandshake | None, passed: datetime | None
    ) -> Fields:
        """Pass a new handshake on to the other side; returns the fields that show this, with its own."""
        if sent is None or sent.sent_at == passed:
            return {}
        peer = self._broker.handshakes.exchange(record, self._cluster, sent.handshake)
        return {
            "handshakeTime": msgspec.to_builtins(sent.sent_at),
            "peer": peer and cluster_namespaces.replacement(peer),
        }

    async def find(self, reservation: str) -> bodies.Reservation:
        """`NotFound` unless the cluster is its requester or a provider of it."""
        found = await authorization.visible_to(
            self._broker, ReservationId(reservation), self._cluster
        )
        return conversion.from_reservation(found)

    async def grant(self, record: Record) -> str:
        """The grant of a reservation for this side; empty if there is none."""
        granting = self._sign_grant
        return ("" if granting is None else await granting(record, self._cluster)) or ""

    async def release_for_deleted(self, obj: Reservation, cache: NamespaceCache) -> None:
        """Release the reservation of an object, if it is not finished."""
        found = await self._reservation_of_object(obj, cache)
        if found is not None and found.phase not in FINAL:
            with self._as_cluster():
                await self._broker.release(found.id, Reason.DELETED)

    async def _reserve(self, obj: Reservation) -> Record:
        if obj.spec.requester_id:
            authorization.check_namespace_cluster(
                obj.spec.requester_id, self._cluster, "requesterID"
            )
        key = route.check_idempotency_key(plan.idempotency_key(obj))
        request = conversion.to_request(obj.spec, self._cluster, key, self._terms)
        return await self._broker.reserve(request)

    async def _reservation_of_object(
        self, obj: Reservation, cache: NamespaceCache
    ) -> Record | None:
        """The reservation that the object shows; else by key, unless another object shows it."""
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


def instruction_for_side(cluster: ClusterId, record: Record, side: Side) -> Instruction | None:
    """The instruction for a cluster on one side of a reservation; None if it is not on that side."""
    found = streams.instructions_for(cluster, record)
    return next((one for one in found if one.side is side), None)


_STATUS_FIELDS: Final = (
    *("phase", "active", "score", "message", "lastUpdateTime", "validUntil"),
    *("cordonReason", "reservations"),
)


def _reservation_id(obj: Reservation) -> ReservationId:
    shown = plan.instruction_of(obj)
    if shown is None:
        raise errors.reservation_not_found(obj.metadata.name)
    return ReservationId(shown.reservation.id)


SESSION_CHECK_SECONDS = 15.0
"""Seconds between two checks whether the agent is still there."""


class AgentWatch:
    """Use `start`; ends by `stop` or when the broker closes its subscription, and then calls `on_end`."""

    def __init__(
        self,
        dependencies: Dependencies,
        cluster: ClusterId,
        spec: ClusterSessionSpec,
        on_end: Callable[[AgentWatch], None],
        on_handshakes: Callable[[list[ReservationId]], None],
    ) -> None:
        """Also ends if the agent writes nothing for a while: no connection shows that the process died."""
        self.id = spec.watch
        self.agent = spec.agent
        self._broker, self._sessions = dependencies.broker, dependencies.sessions
        self._timeout = dependencies.session_timeout
        self._cluster = cluster
        self._last_write_at = self._broker.clock()
        self._on_end = on_end
        self._on_handshakes = on_handshakes
        self._task: asyncio.Task[None] | None = None

    async def start(self, origin: str) -> None:
        """`IdentityInUse` while another agent is active, `NotReady` while the broker is not."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(origin, begun), name=f"watch {self.id}")
        await begun

    def touch(self) -> None:
        """The agent has written something."""
        self._last_write_at = self._broker.clock()
        self._sessions.touch(self._cluster, self.agent)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, origin: str, started: asyncio.Future[None]) -> None:
        try:
            async with self._broker.stream(self._cluster, None) as opening:
                feed = opening.subscription
                with self._sessions.hold_open(self._cluster, self.agent, origin, feed):
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
        if self._broker.clock() - self._last_write_at < self._timeout:
            return False
        reason = "the agent has written nothing"
        log.info("Agent watch expired", agent=self.agent, cluster=self._cluster, reason=reason)
        return True
