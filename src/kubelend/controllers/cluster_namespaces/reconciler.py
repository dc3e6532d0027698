"""Reconciles one cluster namespace: answers requests, and mirrors the ledger's state into its objects.

`ClusterNamespaces` calls `reconcile` after each change, one call at a time per namespace. The caller
is the cluster of the namespace, whatever the objects claim. What `NamespaceWriter` writes is put into the
cache as the API server returned it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.broker import authorization
from kubelend.broker.streams import Side
from kubelend.controllers import labels
from kubelend.controllers.cluster_namespaces import handlers, plan
from kubelend.controllers.cluster_namespaces.handlers import Dependencies, RequestHandlers
from kubelend.controllers.cluster_namespaces.plan import (
    InstructionObject,
    NamespaceCache,
    PlannedWrite,
    WriteInstruction,
)
from kubelend.controllers.reconciler import NextDue
from kubelend.core.errors import InvalidInput, KubelendError, NotFound, NotLeader, NotReady
from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.kube import resources
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.objects import StoredObject
from kubelend.wire import cluster_namespaces
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, ClusterAdvertisement, Reservation
from kubelend.wire.objects import AgentRequest, BrokerResponse, Kind, Object, ProviderInstruction

log = structlog.get_logger("kubelend.cluster_namespaces")


MAX_CONCURRENT_WRITES = 16
"""Concurrent writes in one namespace."""

MAX_HANDSHAKES_PER_NOTICE = 256

INSTRUCTION_RESOURCE = resources.resource_for(ProviderInstruction)


class NamespaceReconciler:
    """Reconciles one cluster namespace."""

    def __init__(
        self,
        dependencies: Dependencies,
        namespace: str,
        cluster: ClusterId,
        enqueue: Callable[[], None],
    ) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.cache = NamespaceCache()
        self.is_being_deleted = False
        """Whether the namespace has a deletionTimestamp, so that no object can be created in it."""
        self._dependencies = dependencies
        self._handlers = RequestHandlers(dependencies, cluster, namespace)
        self._enqueue = enqueue
        self._stream: handlers.AgentStream | None = None
        self._handshakes: dict[ReservationId, None] = {}
        """Reservations with a new handshake, of which the agent is not notified yet."""
        self._ledger: Ledger | None = None
        """The ledger that was mirrored last: after a reload or a change of leader it is another one."""
        self._writer = NamespaceWriter(dependencies, namespace, cluster, self.cache)
        self._rejections_due = NextDue()
        """When the next rejected request may be deleted."""
        self._logged_errors: dict[str, str] = {}
        """Errors by object, to log each once."""

    @property
    def is_due(self) -> bool:
        """Whether time alone requires a reconcile."""
        broker = self._dependencies.broker
        return self._rejections_due.is_due(broker.clock()) and broker.leadership.is_leader

    async def reconcile(self) -> None:
        """Process all that is pending. After an error everything is processed again."""
        if not self._dependencies.broker.leadership.is_leader:
            return
        try:
            await self._reconcile()
        except BaseException:
            self.cache.enqueue_all()
            self._ledger = None
            raise

    async def stop(self) -> None:
        """The namespace is no cluster namespace any more, or the broker stops."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.stop()

    # -- reconcile

    async def _reconcile(self) -> None:
        session = self.cache.session
        request = None if session is None else plan.pending_request(session)
        self._touch_session(request)
        self._enqueue_rejected()
        error = await self._detect_reload()
        while any(pending := self.cache.pop_pending()):
            error = await self._handle(pending, error)
        if request is not None:
            await self._skip_undecodable(
                cluster_namespaces.SESSION_NAME, self._respond_to_session, request, error
            )
        else:
            await self._sync_session_status()
        if error is not None:
            raise error

    async def _handle(
        self, pending: plan.PendingWork, earlier: KubelendError | None
    ) -> KubelendError | None:
        """Returns the first error: an object that cannot be written does not block the others."""
        try:
            await self._process_objects(pending.objects)
            if earlier is None:
                return await self._mirror_reservations(pending.reservations)
        except NotLeader:
            raise
        except KubelendError as error:
            return earlier or error
        return earlier

    async def _detect_reload(self) -> KubelendError | None:
        """After a reload every object may be wrong, including those whose record the ledger has lost."""
        try:
            ledger = await self._dependencies.broker.read(lambda ledger: ledger)
        except KubelendError as error:
            return error
        if ledger is not self._ledger:
            self._ledger = ledger
            self.cache.enqueue_all()
            for record in ledger.by_cluster(self.cluster):
                self.cache.enqueue_reservation(record.id)
        return None

    async def _process_objects(self, found: Iterable[Object]) -> None:
        kinds = (Reservation, ProviderInstruction)
        first = [one for one in found if isinstance(one, kinds)]
        await _gather(self._skip_undecodable(one.key, self._process, one) for one in first)
        for one in found:
            if isinstance(one, ClusterAdvertisement) and plan.pending_request(one):
                await self._skip_undecodable(one.key, self._respond_to_advertisement, one)

    async def _process(self, obj: InstructionObject) -> None:
        if isinstance(obj, Reservation) and labels.is_being_deleted(obj.metadata):
            await self._finalize(obj)
            return
        request = plan.pending_request(obj)
        self._touch_session(request)
        verb = plan.verb_from_conditions(obj) if isinstance(obj, Reservation) else ""
        if request is None and verb:
            last = plan.response_of(obj) or cluster_namespaces.NO_RESPONSE
            request = AgentRequest(last.request_id, verb)
        if request is None:
            if isinstance(obj, Reservation):
                await self._maintain(obj)
        elif isinstance(obj, Reservation):
            await self._respond_to_reservation(obj, request)
        else:
            await self._respond_to_instruction(obj, request)

    async def _maintain(self, obj: Reservation) -> None:
        """A reservation without a pending request."""
        broker = self._dependencies.broker
        due = labels.rejected_in_cluster_namespace_until(obj, broker.retention)
        if plan.needs_finalizer(obj, self.cluster):
            await self._writer.add_finalizer(obj)
        elif self._rejections_due.has_passed(due, broker.clock()):
            await self._writer.delete(obj)

    def _enqueue_rejected(self) -> None:
        """Their agents would have deleted them, but may no longer run."""
        if self.is_due:
            self._rejections_due.clear()
            self.cache.enqueue_matching(
                lambda one: isinstance(one, Reservation) and one.status.response is not None
            )

    # -- requests

    def _touch_session(self, request: AgentRequest | None) -> None:
        if request is not None and self._stream is not None:
            self._stream.touch(request.agent)

    async def _respond_to_reservation(self, obj: Reservation, request: AgentRequest) -> None:
        if request.verb == "reserve" and not labels.has_finalizer(obj.metadata):
            held = await self._writer.add_finalizer(obj)
            if held is None:
                return
            obj = held
        try:
            record = await self._handlers.handle_reservation(obj, request)
        except NotLeader:
            raise
        except KubelendError as error:
            if error.retryable and not request.id:  # no client would repeat the request
                raise
            response = self._error_response(obj, request, error)
            if response.body:
                await self._writer.patch_status(
                    obj, {"response": cluster_namespaces.response_fields(response)}
                )
            else:
                now = self._dependencies.broker.clock()
                status = plan.error_status_patch(obj, error, response, now)
                await self._writer.patch_status(obj, status)
        else:
            await self._writer.write_requester_side(obj, record, request.id)

    async def _respond_to_instruction(
        self, obj: ProviderInstruction, request: AgentRequest
    ) -> None:
        try:
            record = await self._handlers.handle_instruction(obj, request)
        except NotLeader:
            raise
        except KubelendError as error:
            fields = cluster_namespaces.response_fields(self._error_response(obj, request, error))
            await self._writer.patch(INSTRUCTION_RESOURCE, obj, {"spec": {"response": fields}})
        else:
            part = handlers.instruction_for_side(self.cluster, record, Side.PROVIDER)
            if part is not None:
                await self._writer.write_provider_side(plan.WriteInstruction(part, obj), request.id)

    async def _respond_to_advertisement(self, obj: ClusterAdvertisement) -> None:
        """The resulting instructions are written before the response, so that its reader finds them."""
        request = plan.pending_request(obj) or AgentRequest("", "publish")
        self._touch_session(request)
        try:
            body, status = await self._handlers.handle_advertisement(obj, request)
            response = BrokerResponse(request.id, cluster_namespaces.body_text(body))
        except NotLeader:
            raise
        except KubelendError as error:
            response = BrokerResponse(request.id, "", cluster_namespaces.error_text(error))
            status = {"message": str(error), "active": False}
        else:
            await self._mirror_pending()
        status["observedGeneration"] = obj.metadata.generation
        await self._writer.patch_status(
            obj, status | {"response": cluster_namespaces.response_fields(response)}
        )

    async def _respond_to_session(
        self, request: AgentRequest, namespace_error: KubelendError | None
    ) -> None:
        status: dict[str, object] = {"clusterID": self.cluster}
        response = BrokerResponse(request.id)
        try:
            if request.verb == "ping":
                self._check_ready()
            elif namespace_error is not None:
                raise handlers.as_retryable(namespace_error)
            status |= await self._execute_session_request(request)
            response = replace(response, body=await self._handlers.handle_session(request))
        except NotLeader:
            raise
        except KubelendError as error:
            response = replace(response, error=cluster_namespaces.error_text(error))
        status |= self._handshake_notice() | {
            "session": "" if self._stream is None else self._stream.name,
            "lastUpdateTime": self._dependencies.broker.clock(),
            "response": cluster_namespaces.response_fields(response),
        }
        session = self.cache.session
        if session is not None:
            await self._writer.patch_status(session, status)

    async def _execute_session_request(self, request: AgentRequest) -> dict[str, object]:
        """Requests for the whole namespace."""
        if request.verb == "leave":
            if self._stream is not None and self._stream.agent == request.agent:
                await self.stop()
            return {}
        self._handlers.authorize(request, claims=request.verb == "listen")
        if request.verb == "listen":
            await self._open_stream(request.agent)
        ends = await self._dependencies.broker.read(
            lambda ledger: (ledger.revision, ledger.compacted_revision)
        )
        await self._mirror_pending()
        return {"revision": ends[0], "compactedRevision": ends[1]}

    async def _open_stream(self, agent: str) -> None:
        stream = handlers.AgentStream(
            self._dependencies, self.cluster, agent, self._on_stream_end, self._on_handshakes
        )
        await stream.start(f"in namespace {self.namespace}")
        previous, self._stream = self._stream, stream
        if previous is not None:
            await previous.stop()

    def _on_stream_end(self, stream: handlers.AgentStream) -> None:
        if self._stream is stream:
            self._stream = None
            self._enqueue()

    def _on_handshakes(self, reservations: list[ReservationId]) -> None:
        self._handshakes.update(dict.fromkeys(reservations))
        self._enqueue()

    def _check_ready(self) -> None:
        if (reason := self._dependencies.broker.unready) is not None:
            raise NotReady(f"the broker is not ready: {reason}", hint="try again later")

    async def _sync_session_status(self) -> None:
        session = self.cache.session
        name = "" if self._stream is None else self._stream.name
        if session is None:
            return
        notice = self._handshake_notice()
        if (session.status.session, session.status.cluster_id) != (name, self.cluster) or notice:
            now = self._dependencies.broker.clock()
            status = {"session": name, "clusterID": self.cluster, "lastUpdateTime": now}
            await self._writer.patch_status(session, status | notice)

    def _handshake_notice(self) -> dict[str, object]:
        """For a patch of the status. The rest is for the next notice."""
        taken = [*self._handshakes][:MAX_HANDSHAKES_PER_NOTICE]
        for each in taken:
            del self._handshakes[each]
        if self._handshakes:
            self._enqueue()
        return {"handshakes": {"id": uuid.uuid4().hex, "reservations": taken}} if taken else {}

    def _error_response(
        self, obj: InstructionObject, request: AgentRequest, error: KubelendError
    ) -> BrokerResponse:
        """The body of the last response stays valid."""
        before = plan.response_of(obj) or cluster_namespaces.NO_RESPONSE
        return BrokerResponse(request.id, before.body, cluster_namespaces.error_text(error))

    # -- the ledger's state

    async def _mirror_reservations(self, ids: Iterable[ReservationId]) -> KubelendError | None:
        try:
            records = await self._dependencies.broker.read(
                lambda ledger: {one: ledger.reservations.get(one) for one in ids}
            )
        except KubelendError as error:
            return error
        await _gather(
            self._skip_undecodable(one, self._mirror_reservation, one, record)
            for one, record in records.items()
        )
        return None

    async def _mirror_reservation(self, id: ReservationId, record: Record | None) -> None:
        await _gather([self._execute(step) for step in self._plan(id, record)])

    async def _mirror_pending(self) -> None:
        """Changes since the last batch, so that the reader of the next response finds them."""
        if (error := await self._mirror_reservations(self.cache.pop_reservations())) is not None:
            raise error

    def _plan(self, id: ReservationId, record: Record | None) -> list[PlannedWrite]:
        own, lent = self.cache.requester_object(id, record), self.cache.provider_object(id)
        steps = plan.plan_reservation_objects(self.cluster, record, own, lent)
        # Nothing can be created in a namespace that is being deleted.
        return [step for step in steps if not (self.is_being_deleted and step.obj is None)]

    async def _execute(self, step: PlannedWrite) -> None:
        if isinstance(step, plan.DeleteObject):
            await self._dependencies.broker.check_fencing()
            await self._writer.delete(step.obj)
        elif step.instruction.side is Side.PROVIDER:
            await self._writer.write_provider_side(step)
        else:
            await self._writer.write_requester_side(step.obj, step.instruction.reservation)

    async def _finalize(self, obj: Reservation) -> None:
        """The object is being deleted: release its reservation, then remove the finalizer."""
        await self._handlers.release_for_deleted(obj, self.cache)
        # A stale ledger may not know the reservation.
        await self._dependencies.broker.check_fencing()
        if labels.has_finalizer(obj.metadata):
            left = [one for one in obj.metadata.finalizers if one != RESERVATION_FINALIZER]
            await self._writer.write_finalizers(obj, left)

    async def _skip_undecodable(
        self, name: str, work: Callable[..., Awaitable[None]], *arguments: object
    ) -> None:
        """Run `work`, and skip the object if it cannot be encoded or decoded."""
        try:
            await work(*arguments)
        except msgspec.MsgspecError as error:
            if self._logged_errors.get(name) != str(error):
                self._logged_errors[name] = str(error)
                about = {"namespace": self.namespace, "name": name, "error": str(error)}
                log.warning("Skipping object that cannot be processed", **about)
        else:
            self._logged_errors.pop(name, None)


async def _gather(work: Iterable[Awaitable[None]]) -> None:
    """Run all of it, even if some fail, then raise the first error."""
    for failure in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(failure, BaseException):
            raise failure


class NamespaceWriter:
    """Writes into one cluster namespace."""

    def __init__(
        self, dependencies: Dependencies, namespace: str, cluster: ClusterId, cache: NamespaceCache
    ) -> None:
        self._dependencies = dependencies
        self._namespace = namespace
        self._cluster = cluster
        self._cache = cache
        self._writes = asyncio.Semaphore(MAX_CONCURRENT_WRITES)

    async def write_requester_side(
        self, obj: InstructionObject | None, record: Record, request_id: str | None = None
    ) -> None:
        part = handlers.instruction_for_side(self._cluster, record, Side.REQUESTER)
        if part is None or isinstance(obj, ProviderInstruction):
            return
        target = await self._create_reservation(record) if obj is None else obj
        response = await self._response(WriteInstruction(part, obj), request_id)
        status = plan.reservation_status_patch(
            target, record, response, self._dependencies.broker.clock()
        )
        await self._patch(
            labels.RESERVATION_RESOURCE, target.metadata.name, {"status": status}, "status"
        )

    async def _create_reservation(self, record: Record) -> StoredObject:
        """With all fields, or the minimal ones if the server's CRD rejects them."""
        create, kind = self._dependencies.client.create, objects.STORED_RESERVATIONS
        async with self._writes:
            try:
                return await create(kind, plan.reservation_object(record, self._namespace))
            except InvalidInput:
                least = plan.reservation_object(record, self._namespace, in_full=False)
                return await create(kind, least)

    async def write_provider_side(
        self, step: WriteInstruction, request_id: str | None = None
    ) -> None:
        response = await self._response(step, request_id)
        if step.obj is None:
            made = plan.provider_instruction_object(step.instruction, response, self._namespace)
            async with self._writes:
                created = await self._dependencies.client.create(INSTRUCTION_RESOURCE, made)
            self._cache.handle(created)
        elif isinstance(step.obj, ProviderInstruction):
            spec = plan.provider_instruction_patch(step.instruction, response)
            await self.patch(INSTRUCTION_RESOURCE, step.obj, {"spec": spec})

    async def _response(self, step: WriteInstruction, request_id: str | None) -> BrokerResponse:
        """The response for an object; without a new request the request ID of the last one stays."""
        record, granting = step.instruction.reservation, self._dependencies.sign_grant
        grant = None if granting is None else await granting(record, self._cluster)
        body = cluster_namespaces.body_text(
            authorization.instruction_body(step.instruction, grant or "")
        )
        before = cluster_namespaces.NO_RESPONSE if step.obj is None else plan.response_of(step.obj)
        if request_id is not None:
            return BrokerResponse(request_id, body)
        return replace(before or cluster_namespaces.NO_RESPONSE, body=body)

    async def add_finalizer(self, obj: Reservation) -> Reservation | None:
        """None if the object no longer exists: then nothing is requested."""
        return await self.write_finalizers(obj, [*obj.metadata.finalizers, RESERVATION_FINALIZER])

    async def write_finalizers(self, obj: Reservation, finalizers: list[str]) -> Reservation | None:
        metadata = {"finalizers": finalizers, "resourceVersion": obj.metadata.resource_version}
        return await self.patch(labels.RESERVATION_RESOURCE, obj, {"metadata": metadata})

    async def delete(self, obj: InstructionObject) -> None:
        """If the object has changed meanwhile, it stays, and the watch reports it."""
        async with self._writes:
            await labels.delete_if_unchanged(
                self._dependencies.client, resources.resource_for(type(obj)), obj
            )

    async def patch_status(self, obj: Kind, status: dict[str, object]) -> None:
        await self.patch(resources.resource_for(type(obj)), obj, {"status": status}, "status")

    async def patch(
        self, resource: Resource[Kind], obj: Kind, change: dict[str, object], subresource: str = ""
    ) -> Kind | None:
        return await self._patch(resource, obj.metadata.name, change, subresource)

    async def _patch(
        self, resource: Resource[Kind], name: str, change: dict[str, object], subresource: str
    ) -> Kind | None:
        async with self._writes:
            try:
                found = await self._dependencies.client.patch(
                    resource, name, self._namespace, change, subresource=subresource
                )
            except NotFound:
                return None
        self._cache.handle(found)
        return found
