"""The requester: reconciles the ResourceRequests of the cluster into reservations, and renews and
releases them.

A root task of the agent, level-triggered: each reconcile compares an object with the latest state of
its reservation and does what is missing. The request is written to the status before it is sent (see
`agent.resource_requests`), so a reconcile can be interrupted anywhere and repeated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import structlog
from msgspec.structs import replace

from kubelend.agent import conditions, controller, events, reservation_cache, resource_requests
from kubelend.agent.controller import LocalCache
from kubelend.agent.health import ComponentHealth
from kubelend.agent.instructions import ExpiryTracker, InstructionReconciler, time_text
from kubelend.agent.ports import BrokerCommunicator, Clock, Deleted, Listed, LocalObjects
from kubelend.agent.reservation_cache import LIVE_PHASES, UNFINISHED_PHASES, ReservationCache
from kubelend.agent.resource_requests import REQUEST_FINALIZER, RequestState
from kubelend.core.errors import InvalidInput, KubelendError, NotFound, WrongPhase
from kubelend.kits import tasks
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.wire import bodies
from kubelend.wire.events import EmitEvent, EventRecord, discard_event
from kubelend.wire.objects import (
    Kind,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestStatus,
    SentRequest,
)

COMPONENT: Final = "requester"
FINISHED_TTL: Final = timedelta(hours=1)

log = structlog.get_logger("kubelend.agent")


class ResourceRequestReconciler:
    """Use `run` as a root task."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        health: ComponentHealth,
        clock: Clock,
        *,
        cluster_id: str,
        namespace: str = "default",
        finished_ttl: timedelta = FINISHED_TTL,
        finalizers: tuple[str, ...] = (),
        chance: Callable[[], float] = random.random,
        emit: EmitEvent = discard_event,
    ) -> None:
        """`namespace` is that of the ReservationInstructions.

        `finished_ttl` is how long they are retained after their reservation has finished, and `finalizers`
        are those of new ones.
        """
        self._objects = objects
        self._reservations = reservations
        self._health = health
        self._clock = clock
        self._emit = emit
        self._chance = chance
        self._queue = ReconcileQueue("ResourceRequest", self._reconcile, log, chance=chance)
        self._cache = RequestCache(self._queue.add)
        self._expiry = ExpiryTracker(clock, chance)
        self._client = ReservationClient(communicator, reservations, self._expiry, cluster_id)
        self._instructions = InstructionReconciler(
            objects,
            communicator,
            reservations,
            clock,
            self._expiry,
            namespace,
            self._on_instruction_change,
            offload_lookup=self._offloaded_namespaces,
            cluster_id=cluster_id,
            finished_ttl=finished_ttl,
            finalizers=finalizers,
            chance=chance,
            emit=emit,
        )
        self._renewal_errors: dict[str, KubelendError] = {}
        """The last renewal error of each reservation."""
        self._watch_errors: dict[str, str] = {}
        """The watch error of each kind."""
        reservations.subscribe(self._on_reservation_change)
        reservations.on_reconnect(self._queue.retry_now)
        reservations.on_reconnect(self._instructions.queue.retry_now)

    async def run(self) -> None:
        """Reconcile requests and instructions. Runs until cancelled."""
        for known in self._reservations.unfinished():
            self._instructions.queue.add(known.id)
        await tasks.run_all(
            {
                "watch requests": self._watch(ResourceRequest, self._cache.handle_event),
                "watch instructions": self._watch(
                    ReservationInstruction, self._instructions.handle_event
                ),
                "reconcile requests": self._queue.run(),
                "reconcile instructions": self._instructions.queue.run(),
            }
        )

    # -- triggers

    async def _watch(
        self, kind: type[Kind], on_event: Callable[[Kind | Deleted | Listed], None]
    ) -> None:
        def report(error: str) -> None:
            self._watch_errors[kind.plural] = error
            self._health.report(COMPONENT, "; ".join(filter(None, self._watch_errors.values())))

        await controller.watch_objects(self._objects, kind, on_event, report, self._chance)

    def _on_reservation_change(self, reservation: str) -> None:
        self._instructions.queue.add(reservation)
        self._on_instruction_change(reservation)

    def _on_instruction_change(self, reservation: str) -> None:
        owner = self._cache.owner(reservation)
        if owner:
            self._queue.add(owner)

    def _offloaded_namespaces(self, reservation: str) -> tuple[str, ...] | None:
        found = self._cache.find(self._cache.owner(reservation))
        return None if found is None else resource_requests.allowed_namespaces(found)

    # -- reconcile

    async def _reconcile(self, key: str) -> None:
        for gone in self._cache.tombstones(key):
            await self._release(gone)
            self._cache.forget(gone)
        found = await self._find(key)
        if found is None:
            return
        if found.metadata.deletion_timestamp is not None:
            await self._finalize(found)
        else:
            await self._sync(found)

    async def _find(self, key: str) -> ResourceRequest | None:
        """What the watch has shown is enough: a write of an old version is rejected, and then read again."""
        known = self._cache.find(key)
        is_live = known is not None and known.metadata.deletion_timestamp is None
        return known if is_live else await self._objects.find(ResourceRequest, key)

    async def _sync(self, found: ResourceRequest) -> None:
        state, requested = resource_requests.request_state(found), found.status.sent_request
        if state is RequestState.NEW:
            await self._start(found)
        elif state is RequestState.BOUND:
            await self._sync_bound(found)
        elif state is RequestState.REQUESTED and requested is not None:
            await self._request_reservation(found, requested)
        elif found.status.observed_generation != found.metadata.generation:
            generation = found.metadata.generation
            await self._update_status(found, replace(found.status, observed_generation=generation))

    # -- requesting

    async def _start(self, found: ResourceRequest) -> None:
        """Write the request to the status, then send it."""
        try:
            resource_requests.check_namespaces(found)
            resource_requests.request_from_spec(found.spec)
        except InvalidInput as error:
            status = resource_requests.failed_status(found.metadata.generation, error)
            await self._update_status(found, status)
            return
        if REQUEST_FINALIZER not in found.metadata.finalizers:
            marked = await controller.add_finalizer(self._objects, found, REQUEST_FINALIZER)
            if marked is None or REQUEST_FINALIZER not in marked.metadata.finalizers:
                return  # deleted in the meantime
            found = marked
        request = resource_requests.request_from_spec(found.spec)
        requested = SentRequest(found.metadata.generation, request)
        written = await self._update_status(found, resource_requests.status_for_request(requested))
        if written is not None:
            await self._request_reservation(written, requested, is_first=True)

    async def _request_reservation(
        self, found: ResourceRequest, sent: SentRequest, *, is_first: bool = False
    ) -> None:
        try:
            body = await self._client.reserve(found, sent, is_first=is_first)
        except KubelendError as error:
            if resource_requests.is_transient(error):
                status = resource_requests.status_for_transient_error(sent, error)
                await self._update_status(found, status)
                raise
            status = resource_requests.failed_status(sent.generation, error)
            await self._update_status(found, status)
            return
        # Bind it before subscribers are notified, so that they find its owner.
        self._cache.bind(body.id, found.key)
        self._reservations.put(body)
        body = self._reservations.find(body.id) or body
        await self._update_status(found, resource_requests.status_for_reservation(found, body))
        # The stream may have delivered it before it was bound.
        self._on_reservation_change(body.id)

    # -- bound

    async def _sync_bound(self, found: ResourceRequest) -> None:
        name = found.status.reservation_name
        body = self._reservations.find(name) or await self._client.fetch(name)
        if body is not None:
            body = await self._renew_if_due(found, body)
        if body is None:
            await self._update_status(found, resource_requests.status_for_lost_reservation(found))
        else:
            await self._report_reservation(found, body)

    async def _report_reservation(self, found: ResourceRequest, body: bodies.Reservation) -> None:
        error = self._renewal_errors.get(body.id) if found.spec.renew else None
        await self._update_status(
            found, resource_requests.status_for_reservation(found, body, error)
        )
        if error is not None and body.status.phase in LIVE_PHASES:
            raise error
        self._renewal_errors.pop(body.id, None)

    async def _renew_if_due(
        self, found: ResourceRequest, body: bodies.Reservation
    ) -> bodies.Reservation | None:
        """Renew if it is due, and schedule the next renewal. Returns the state afterwards."""
        if not found.spec.renew or body.status.phase not in LIVE_PHASES:
            return body
        self._expiry.observe(body)
        # Read once: it may become due between two reads of the clock.
        left = self._expiry.time_to_renewal(body.id)
        renewed: bodies.Reservation | None = body
        if left == timedelta():
            renewed = await self._renew(body)
            left = self._expiry.time_to_renewal(body.id)
        if left:
            self._queue.add_after(found.key, left)
        return renewed

    async def _renew(self, body: bodies.Reservation) -> bodies.Reservation | None:
        try:
            renewed = await self._client.renew(body.id)
        except KubelendError as error:
            self._renewal_errors[body.id] = error
            is_over = isinstance(error, NotFound | WrongPhase)
            return await self._client.fetch(body.id) if is_over else body
        self._renewal_errors.pop(body.id, None)
        expires_at = time_text(renewed.status.expires_at)
        log.info("Reservation renewed", reservation=body.id, expires_at=expires_at)
        return renewed

    # -- releasing

    async def _finalize(self, found: ResourceRequest) -> None:
        """The object is being deleted: release its reservation, then remove the finalizer."""
        if REQUEST_FINALIZER not in found.metadata.finalizers:
            return
        try:
            await self._release(found)
        except KubelendError as error:
            status = resource_requests.status_for_pending_release(found, error)
            await self._update_status(found, status)
            raise
        newest = await self._objects.find(ResourceRequest, found.key)
        if newest is not None and newest.metadata.uid == found.metadata.uid:
            self._cache.mark_released(newest)
            await controller.remove_finalizer(self._objects, newest, REQUEST_FINALIZER)

    async def _release(self, found: ResourceRequest) -> None:
        released = await self._client.release(found)
        if released:
            log.info("ResourceRequest released", **_request_log_keys(found), reservation=released)
            message = f"Released reservation {released} because the ResourceRequest was deleted"
            self._emit(EventRecord("Normal", "Released", message, found))
        self._cache.unbind(found.status.reservation_name)

    # -- helpers

    async def _update_status(
        self, found: ResourceRequest, status: ResourceRequestStatus
    ) -> ResourceRequest | None:
        """Write the status with its conditions, and log the step. None if the object is gone."""

        def change(newest: ResourceRequest) -> ResourceRequestStatus:
            instruction = self._instructions.find(status.reservation_name)
            return conditions.apply_request_conditions(newest, status, instruction, self._clock())

        return await controller.update_status(
            self._objects, found, change, self._clock, self._on_written, is_current=True
        )

    def _on_written(self, before: ResourceRequest, after: ResourceRequest) -> None:
        self._cache.on_update(after)
        _log_step(after, before.status)
        for event in events.request_events(before, after):
            self._emit(event)


_STEP_MESSAGES: Final = {
    "Reserved": "ResourceRequest reserved",
    "Active": "ResourceRequest active",
    "Released": "ResourceRequest released",
    "Expired": "ResourceRequest expired",
}


def _log_step(written: ResourceRequest, before: ResourceRequestStatus) -> None:
    """One line per step of a request, with what an operator searches for; nothing if none was made."""
    status = written.status
    keys = _request_log_keys(written)
    amounts = {"cpu": written.spec.requested_cpu, "memory": written.spec.requested_memory}
    if status.sent_request is not None and status.sent_request != before.sent_request:
        log.info("ResourceRequest received", **keys, **amounts)
    # A failover to another cluster is a step, a renewal is not.
    fields = ("phase", "reservation_name", "target_cluster_id")
    if all(getattr(status, name) == getattr(before, name) for name in fields):
        return
    if status.phase == "Failed":
        event = "failed" if status.reservation_name else "rejected"
        log.info(f"ResourceRequest {event}", **keys, reason=status.reason, error=status.message)
    elif status.phase == "Pending" and status.reservation_name:
        keys["reservation"] = status.reservation_name
        log.info("ResourceRequest queued", **keys, reason=status.reason)
    elif status.phase in _STEP_MESSAGES:
        log.info(
            _STEP_MESSAGES[status.phase],
            **keys,
            reservation=status.reservation_name,
            cluster=status.target_cluster_id,
            **amounts,
            expires_at=time_text(status.expires_at),
        )


def _request_log_keys(found: ResourceRequest) -> dict[str, str]:
    return {"namespace": found.metadata.namespace, "name": found.metadata.name}


class RequestCache(LocalCache[ResourceRequest]):
    """ResourceRequests, and which of them owns a reservation."""

    def __init__(self, enqueue: Callable[[str], None]) -> None:
        super().__init__(ResourceRequest, enqueue)
        self._owners: dict[str, str] = {}
        self._released: set[str] = set()
        """UIDs of objects whose deletion is expected."""

    def owner(self, reservation: str) -> str:
        """The key of the ResourceRequest of a reservation; empty if there is none here."""
        return self._owners.get(reservation, "")

    def bind(self, reservation: str, key: str) -> None:
        self._owners[reservation] = key

    def unbind(self, reservation: str) -> None:
        self._owners.pop(reservation, None)

    def mark_released(self, found: ResourceRequest) -> None:
        """The object holds nothing; its deletion is expected."""
        self._released.add(found.metadata.uid)

    def forget(self, gone: ResourceRequest) -> None:
        super().forget(gone)
        # Also reservations that are not in a status yet; not those of an object with the same key.
        if not self.tombstones(gone.key) and self.find(gone.key) is None:
            self._owners = {name: key for name, key in self._owners.items() if key != gone.key}

    def on_update(self, found: ResourceRequest) -> None:
        known = self.find(found.key)
        super().on_update(found)
        if known is not None and known.status.reservation_name != found.status.reservation_name:
            self.unbind(known.status.reservation_name)
        if found.status.reservation_name:
            self.bind(found.status.reservation_name, found.key)

    def on_delete(self, gone: ResourceRequest) -> None:
        super().on_delete(gone)
        if gone.metadata.uid in self._released:
            self._released.discard(gone.metadata.uid)
            self.forget(gone)


MAX_CONCURRENT_REQUESTS: Final = 32
"""Concurrent reservation requests. A broker that hangs must not use up all connections, which
releases need too."""


class ReservationClient:
    """The broker calls of one requester cluster."""

    def __init__(
        self,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        expiry: ExpiryTracker,
        cluster_id: str,
    ) -> None:
        self._communicator = communicator
        self._reservations = reservations
        self._expiry = expiry
        self._cluster_id = cluster_id
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def reserve(
        self, found: ResourceRequest, sent: SentRequest, *, is_first: bool
    ) -> bodies.Reservation:
        """Request a reservation. Only on the first attempt is the returned one known to be new."""
        async with self._request_slots:
            body = await self._request(found, sent)
        if is_first:
            self._expiry.confirm(body)
        return body

    async def fetch(self, reservation: str) -> bodies.Reservation | None:
        return await self._reservations.fetch(self._communicator, reservation)

    async def renew(self, reservation: str) -> bodies.Reservation:
        body = await self._reservations.update(self._communicator.renew(reservation))
        self._expiry.confirm(body)
        return body

    async def release(self, found: ResourceRequest) -> str:
        """Release the object's reservation. Returns its ID, empty if there was none."""
        reservation = await self._held_reservation(found)
        if reservation:
            await self._release(reservation)
        return reservation

    async def _request(self, found: ResourceRequest, sent: SentRequest) -> bodies.Reservation:
        key = resource_requests.idempotency_key(
            self._cluster_id, found.metadata.uid, sent.generation
        )
        return await reservation_cache.with_timeout(self._communicator.request(sent.request, key))

    async def _held_reservation(self, found: ResourceRequest) -> str:
        """The ID of the reservation that the object holds, as far as is known; empty if there is none."""
        state = resource_requests.request_state(found)
        name, requested = found.status.reservation_name, found.status.sent_request
        if state is RequestState.BOUND:
            known = self._reservations.find(name)
            return name if known is None or known.status.phase in UNFINISHED_PHASES else ""
        if state is RequestState.REQUESTED and requested is not None:
            return await self._recover_reservation(found, requested)
        return ""

    async def _recover_reservation(self, found: ResourceRequest, sent: SentRequest) -> str:
        """The response may have been lost. Repeating the request finds the reservation by its key."""
        try:
            return (await self._request(found, sent)).id
        except KubelendError as error:
            if resource_requests.is_transient(error):
                raise
            return ""

    async def _release(self, reservation: str) -> None:
        try:
            await self._reservations.update(self._communicator.release(reservation))
        except NotFound:
            self._reservations.remove(reservation)
        except KubelendError as error:
            if resource_requests.is_transient(error):
                raise
            # The object must not be blocked permanently; the reservation ends by its expiry.
            log.warning(
                "Release failed permanently; reservation will expire",
                reservation=reservation,
                error=str(error),
            )
