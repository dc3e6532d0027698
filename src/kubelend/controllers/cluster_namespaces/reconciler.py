"""Reconciles one cluster namespace: does what the agent writes, and mirrors the ledger into its objects.

`ClusterNamespaces` calls `reconcile` after each change, one call at a time per namespace. The caller
is the cluster of the namespace, whatever the objects claim. What `NamespaceWriter` writes is put into the
cache as the API server returned it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog

from kubelend.broker import authorization
from kubelend.broker.streams import Instruction, Side
from kubelend.controllers import labels
from kubelend.controllers.cluster_namespaces import handlers, plan
from kubelend.controllers.cluster_namespaces.handlers import ClusterHandlers, Dependencies
from kubelend.controllers.cluster_namespaces.plan import (
    Fields,
    InstructionObject,
    NamespaceCache,
    PlannedWrite,
)
from kubelend.controllers.reconciler import NextDue
from kubelend.core.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    KubelendError,
    NotFound,
    NotLeader,
    NotReady,
)
from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.kube import resources
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes import objects, projection
from kubelend.stores.kubernetes.objects import StoredObject
from kubelend.wire import cluster_namespaces
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    ClusterAdvertisement,
    ClusterSession,
    ClusterSessionSpec,
    Reservation,
)
from kubelend.wire.objects import Kind, Metadata, Object, ProviderInstruction

log = structlog.get_logger("kubelend.cluster_namespaces")


MAX_CONCURRENT_WRITES = 16
"""Concurrent writes in one namespace."""

StatusKind = TypeVar("StatusKind", Reservation, ClusterAdvertisement, ClusterSession)

INSTRUCTION_RESOURCE = resources.resource_for(ProviderInstruction)


class NamespaceReconciler:
    """Reconciles one cluster namespace."""

    def __init__(
        self,
        dependencies: Dependencies,
        namespace: str,
        cluster: ClusterId,
        cache: NamespaceCache,
        enqueue: Callable[[], None],
    ) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.cache = cache
        self.is_being_deleted = False
        """Whether the namespace has a deletionTimestamp, so that no object can be created in it."""
        self._dependencies = dependencies
        self._handlers = ClusterHandlers(dependencies, cluster, namespace)
        self._enqueue = enqueue
        self._watch: handlers.AgentWatch | None = None
        """The watch of the agent that is served."""
        self._ended_watch = ""
        """ID of the last one that has ended."""
        self._handshakes: dict[ReservationId, None] = {}
        """Reservations with a new handshake, of which the agent is not notified yet."""
        self._ledger: Ledger | None = None
        """The ledger that was mirrored last: after a reload or a change of leader it is another one."""
        self._writer = NamespaceWriter(dependencies, namespace, cluster, self.cache, self._handlers)
        self._retry: KubelendError | None = None
        """Why an object has to be processed again. The rest of the namespace is complete."""
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
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.stop()

    # -- reconcile

    async def _reconcile(self) -> None:
        self._enqueue_rejected()
        error = await self._detect_reload()
        session = self.cache.session  # before the rest: what it asks for is all that is pending now
        while any(pending := self.cache.pop_pending()):
            error = await self._handle(pending, error)
        await self._write_notices()
        if session is not None:
            await self._skip_undecodable(
                cluster_namespaces.SESSION_NAME, self._sync_session, session, error
            )
        retry, self._retry = self._retry, None
        if (failure := error or retry) is not None:
            raise failure

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
            if isinstance(one, ClusterAdvertisement) and plan.is_pending(one):
                await self._skip_undecodable(one.key, self._process_advertisement, one)

    async def _process(self, obj: InstructionObject) -> None:
        if isinstance(obj, Reservation) and labels.is_being_deleted(obj.metadata):
            await self._finalize(obj)
        elif isinstance(obj, Reservation) and (plan.is_pending(obj) or plan.wants_change(obj)):
            await self._process_reservation(obj)
        elif isinstance(obj, Reservation):
            await self._maintain(obj)
        elif plan.is_pending(obj):
            await self._process_report(obj)

    async def _maintain(self, obj: Reservation) -> None:
        """A reservation whose spec is processed."""
        broker = self._dependencies.broker
        due = labels.rejected_until(obj, broker.retention)
        if plan.needs_finalizer(obj, self.cluster):
            await self._writer.add_finalizer(obj)
        elif self._rejections_due.has_passed(due, broker.clock()):
            await self._writer.delete(obj)

    def _enqueue_rejected(self) -> None:
        """Their agents would have deleted them, but may no longer run."""
        if self.is_due:
            self._rejections_due.clear()
            self.cache.enqueue_matching(
                lambda one: isinstance(one, Reservation) and one.status.instruction is None
            )

    # -- what the agent has written

    def _touch(self) -> None:
        """The agent is there."""
        if self._watch is not None:
            self._watch.touch()

    async def _process_reservation(self, obj: Reservation) -> None:
        self._touch()
        if plan.instruction_of(obj) is None and not labels.has_finalizer(obj.metadata):
            held = await self._writer.add_finalizer(obj)
            if held is None:
                return
            obj = held
        fields: Fields = {}
        try:
            record = await self._handlers.apply_reservation(obj)
            if obj.spec.renewal is not None:
                fields["renewTime"] = msgspec.to_builtins(obj.spec.renewal.time)
            fields |= self._handlers.pass_handshake(
                record, obj.spec.handshake, obj.status.handshake_time
            )
        except NotLeader:
            raise
        except KubelendError as error:
            await self._refuse_reservation(obj, error)
        else:
            now = self._dependencies.broker.clock()
            await self._writer.write_requester_side(
                obj, record, fields | plan.observed(obj, None, now)
            )

    async def _refuse_reservation(self, obj: Reservation, error: KubelendError) -> None:
        """The last instruction stays valid."""
        self._retry_later(error)
        now = self._dependencies.broker.clock()
        fields = plan.observed(obj, error, now)
        if plan.instruction_of(obj) is None:
            fields |= plan.error_fields(error)
        elif not error.retryable and obj.spec.renewal is not None:
            fields["renewTime"] = msgspec.to_builtins(obj.spec.renewal.time)
        await self._writer.patch_status(obj, fields)

    def _retry_later(self, error: KubelendError) -> None:
        if error.retryable:
            self._retry = error

    async def _process_report(self, obj: ProviderInstruction) -> None:
        self._touch()
        fields: Fields = {"observedReportTime": msgspec.to_builtins(obj.status.report_time)}
        part: Instruction | None = None
        failure: KubelendError | None = None
        try:
            record = await self._handlers.apply_report(obj)
            fields |= self._handlers.pass_handshake(
                record, obj.status.handshake, obj.spec.handshake_time
            )
            part = handlers.instruction_for_side(self.cluster, record, Side.PROVIDER)
        except NotLeader:
            raise
        except KubelendError as error:
            failure = error
            self._retry_later(error)
        condition = cluster_namespaces.accepted_condition(failure)
        fields["accepted"] = cluster_namespaces.replacement(condition)
        await self._writer.write_provider_side(obj, part, fields)

    async def _process_advertisement(self, obj: ClusterAdvertisement) -> None:
        """The resulting instructions are written before the status, so that its reader finds them."""
        self._touch()
        failure: KubelendError | None = None
        try:
            fields = await self._handlers.advertise(obj)
        except NotLeader:
            raise
        except KubelendError as error:
            failure, fields = error, {"message": str(error), "active": False}
            self._retry_later(error)
        else:
            await self._mirror_pending()
        fields |= plan.observed(obj, failure, self._dependencies.broker.clock())
        await self._writer.patch_status(obj, fields)

    # -- the session

    async def _sync_session(
        self, session: ClusterSession, namespace_error: KubelendError | None
    ) -> None:
        """Show that the namespace is complete, or why it is not, and whether the watch is served."""
        fields: Fields = {}
        if plan.is_pending(session):
            fields = await self._process_session(session, namespace_error)
        elif session.status.watch and session.status.watch == session.spec.watch:
            await self._resume_watch(session.spec)
        watch = "" if self._watch is None else self._watch.id
        await self._writer.patch_status(
            session, fields | {"clusterID": self.cluster, "watch": watch}
        )

    async def _process_session(
        self, session: ClusterSession, namespace_error: KubelendError | None
    ) -> Fields:
        failure: KubelendError | None = None
        keys = self._dependencies.grant_keys
        fields: Fields = {"grantKeys": [] if keys is None else msgspec.to_builtins(keys.keys)}
        self._touch()
        try:
            self._check_ready()
            if namespace_error is not None:
                raise namespace_error
            fields |= await self._show(session.spec)
        except NotLeader:
            raise
        except KubelendError as error:
            failure = error
        return fields | plan.observed(session, failure, self._dependencies.broker.clock())

    async def _show(self, spec: ClusterSessionSpec) -> Fields:
        self._handlers.check_not_revoked()
        await self._serve_watch(spec)
        ends = await self._dependencies.broker.read(
            lambda ledger: (ledger.revision, ledger.compacted_revision)
        )
        await self._mirror_pending()
        name, shown = spec.reservation_name, None
        if name:
            shown = msgspec.to_builtins(await self._handlers.find(name))
        return {"revision": ends[0], "compactedRevision": ends[1], "reservation": shown}

    async def _serve_watch(self, spec: ClusterSessionSpec) -> None:
        """Begin to serve the watch of the spec, and end the previous one. One that has ended stays so."""
        if spec.watch and spec.watch in (self._watch and self._watch.id, self._ended_watch):
            return
        previous, self._watch = self._watch, None
        if previous is not None:
            await previous.stop()
        if spec.watch:
            watch = handlers.AgentWatch(
                self._dependencies, self.cluster, spec, self._on_watch_end, self._on_handshakes
            )
            await watch.start(f"in namespace {self.namespace}")
            self._watch = watch

    async def _resume_watch(self, spec: ClusterSessionSpec) -> None:
        """Another broker has served it. If this one cannot, the agent has to begin again."""
        if self._watch is None:
            with suppress(KubelendError):
                await self._serve_watch(spec)

    def _on_watch_end(self, watch: handlers.AgentWatch) -> None:
        self._ended_watch = watch.id
        if self._watch is watch:
            self._watch = None
            self._enqueue()

    def _on_handshakes(self, reservations: list[ReservationId]) -> None:
        self._handshakes.update(dict.fromkeys(reservations))
        self._enqueue()

    def _check_ready(self) -> None:
        if (reason := self._dependencies.broker.unready) is not None:
            raise NotReady(f"the broker is not ready: {reason}", hint="try again later")

    async def _write_notices(self) -> None:
        """Notify the agent of handshakes, in the objects of their reservations."""
        for reservation in list(self._handshakes):
            self._handshakes.pop(reservation, None)
            own = self.cache.requester_object(reservation, None)
            lent = self.cache.provider_object(reservation)
            if own is not None:
                fields = {"peerHandshakes": own.status.peer_handshakes + 1}
                await self._writer.patch_status(own, fields)
            elif lent is not None:
                fields = {"peerHandshakes": lent.spec.peer_handshakes + 1}
                await self._writer.patch(INSTRUCTION_RESOURCE, lent, {"spec": fields})

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
        match step:
            case plan.DeleteObject(obj):
                await self._dependencies.broker.check_fencing()
                await self._writer.delete(obj)
            case plan.WriteInstruction(part, Reservation() as obj):
                await self._writer.write_requester_side(obj, part.reservation, {})
            case plan.WriteInstruction(part, ProviderInstruction() as obj):
                await self._writer.write_provider_side(obj, part, {})
            case plan.WriteInstruction(part, _):
                await self._writer.create(part)

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
        self,
        dependencies: Dependencies,
        namespace: str,
        cluster: ClusterId,
        cache: NamespaceCache,
        handlers: ClusterHandlers,
    ) -> None:
        self._dependencies = dependencies
        self._namespace = namespace
        self._cluster = cluster
        self._cache = cache
        self._handlers = handlers
        self._writes = asyncio.Semaphore(MAX_CONCURRENT_WRITES)

    async def create(self, part: Instruction) -> None:
        """The object that shows a side of a reservation, which has none yet.

        An earlier attempt whose response was lost, or a previous leader, may have created one that the watch
        has not shown yet: then that one is written, in the same reconcile.
        """
        try:
            await self._create(part)
        except AlreadyExists:
            await self._read_existing(part)

    async def _read_existing(self, part: Instruction) -> None:
        client, shown = self._dependencies.client, part.reservation.id
        found: Object | None
        if part.side is Side.REQUESTER:
            name = cluster_namespaces.reservation_object_name(shown)
            found = await client.find(labels.RESERVATION_RESOURCE, name, self._namespace)
        else:
            name = cluster_namespaces.instruction_object_name(shown)
            found = await client.find(INSTRUCTION_RESOURCE, name, self._namespace)
        if found is not None:
            self._cache.handle(found)
        self._cache.enqueue_reservation(shown)

    async def _create(self, part: Instruction) -> None:
        if part.side is Side.REQUESTER:
            made = await self._create_reservation(part.reservation)
            now = self._dependencies.broker.clock()
            fields = plan.observed(made, None, now)
            await self.write_requester_side(made, part.reservation, fields)
            return
        wanted = plan.provider_instruction_object(
            part, await self._handlers.grant(part.reservation), self._namespace
        )
        async with self._writes:
            created = await self._dependencies.client.create(INSTRUCTION_RESOURCE, wanted)
        self._cache.handle(created)

    async def write_requester_side(
        self, obj: Reservation | StoredObject, record: Record, fields: Fields
    ) -> None:
        """Show the reservation, and further fields of the status."""
        part = handlers.instruction_for_side(self._cluster, record, Side.REQUESTER)
        if part is None:
            return
        shown = authorization.instruction_body(part, await self._handlers.grant(record))
        wanted = projection.reservation_status(record) | {
            "instruction": msgspec.to_builtins(shown),
            **fields,
        }
        status = plan.status_patch(obj, wanted, self._dependencies.broker.clock())
        await self._patch_status(labels.RESERVATION_RESOURCE, obj.metadata, status)

    async def write_provider_side(
        self, obj: ProviderInstruction, part: Instruction | None, fields: Fields
    ) -> None:
        """Show the reservation, if it is known, and further fields of the spec."""
        spec: Fields = {}
        if part is not None:
            grant = await self._handlers.grant(part.reservation)
            spec = plan.provider_instruction_patch(obj, part, grant)
        await self.patch(INSTRUCTION_RESOURCE, obj, {"spec": spec | fields})

    async def _create_reservation(self, record: Record) -> StoredObject:
        """With all fields, or the minimal ones if the server's CRD rejects them."""
        create, kind = self._dependencies.client.create, objects.STORED_RESERVATIONS
        async with self._writes:
            try:
                return await create(kind, plan.reservation_object(record, self._namespace))
            except InvalidInput:
                least = plan.reservation_object(record, self._namespace, in_full=False)
                return await create(kind, least)

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

    async def patch_status(self, obj: StatusKind, wanted: Fields) -> None:
        """Write these fields of the status, if they differ."""
        status = plan.status_patch(obj, wanted, self._dependencies.broker.clock())
        if status:
            await self._patch_status(resources.resource_for(type(obj)), obj.metadata, status)

    async def _patch_status(
        self, resource: Resource[Kind], known: Metadata, status: Fields
    ) -> None:
        """Conditions are a list, of which users set some: it is only replaced as it was read."""
        change: Fields = {"status": status}
        if "conditions" in status:
            change["metadata"] = {"resourceVersion": known.resource_version}
        with suppress(Conflict):  # the watch reports the newer version
            await self._patch(resource, known.name, change, "status")

    async def patch(
        self, resource: Resource[Kind], obj: Kind, change: Fields, subresource: str = ""
    ) -> Kind | None:
        return await self._patch(resource, obj.metadata.name, change, subresource)

    async def _patch(
        self, resource: Resource[Kind], name: str, change: Fields, subresource: str
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
