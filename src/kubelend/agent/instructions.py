"""Reconciles a ReservationInstruction for every reservation of this requester, and tracks expiry and
renewal.

Reservations may have been requested by a ResourceRequest or by other means. When one should have
expired, the broker is asked, because the local clock may be wrong. (Not related to the Kubernetes
Lease.)
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.agent import conditions, controller, events
from kubelend.agent.ports import BrokerCommunicator, Clock, Deleted, Listed, LocalObjects
from kubelend.agent.reservation_cache import LIVE_PHASES, UNFINISHED_PHASES, ReservationCache
from kubelend.core import durations
from kubelend.core.errors import InvalidDuration
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.wire import bodies, quantities
from kubelend.wire.events import EmitEvent, EventRecord
from kubelend.wire.objects import (
    Metadata,
    ReservationInstruction,
    ReservationInstructionSpec,
    ReservationInstructionStatus,
)

log = structlog.get_logger("kubelend.agent")

OffloadLookup = Callable[[str], tuple[str, ...] | None]
"""The namespaces that a reservation's request names; None if its request is not known."""


class InstructionReconciler:
    """Enqueue reservations that change, pass watch events to `handle_event`, and run `queue` as a task."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        clock: Clock,
        expiry: ExpiryTracker,
        namespace: str,
        on_change: Callable[[str], None],
        *,
        offload_lookup: OffloadLookup,
        cluster_id: str,
        finished_ttl: timedelta,
        finalizers: tuple[str, ...] = (),
        chance: Callable[[], float],
        emit: EmitEvent,
    ) -> None:
        """`on_change` is called with a reservation whose instruction's conditions have changed.

        New objects have the `finalizers`, so that their owners need not add them first.
        """
        self.queue = ReconcileQueue("ReservationInstruction", self._reconcile, log, chance=chance)
        self._objects = objects
        self._communicator = communicator
        self._reservations = reservations
        self._clock = clock
        self._expiry = expiry
        self._namespace = namespace
        self._offload_lookup = offload_lookup
        self._on_change = on_change
        self._emit = emit
        self._on_written = controller.emit_all(emit, events.instruction_events)
        self._cluster_id = cluster_id
        self._finished_ttl = finished_ttl
        self._finalizers = finalizers
        self._object_keys: defaultdict[str, set[str]] = defaultdict(set)
        """Keys of each reservation's objects: one, except for objects in a wrong namespace."""
        self._watched: dict[str, ReservationInstruction] = {}
        """The last watched state of each reservation's object."""
        self._finished_since: dict[str, float] = {}
        """Loop time at which reservations without an object finished."""
        self._targets: dict[str, str] = {}
        """The provider in each reservation's instruction, to notice a failover."""

    def handle_event(self, event: ReservationInstruction | Deleted | Listed) -> None:
        """Handle a watch event."""
        match event:
            case Listed(objects):
                for known in self._object_keys:
                    self.queue.add(known)
                self._object_keys.clear()
                self._watched.clear()
                for found in objects:
                    self._on_update(found)
            case Deleted(found):
                if isinstance(found, ReservationInstruction):
                    self._object_keys[found.metadata.name].discard(found.key)
                    self._watched.pop(found.metadata.name, None)
                    self.queue.add(found.metadata.name)
            case found:
                self._on_update(found)

    def _on_update(self, found: object) -> None:
        if isinstance(found, ReservationInstruction):
            name = found.metadata.name
            self._object_keys[name].add(found.key)
            known, self._watched[name] = self._watched.get(name), found
            self.queue.add(name)
            if known is None or _reported_fields(known) != _reported_fields(found):
                self._on_change(name)

    def find(self, reservation: str) -> ReservationInstruction | None:
        """The last watched state of a reservation's object."""
        return self._watched.get(reservation)

    async def _reconcile(self, reservation: str) -> None:
        body = self._reservations.find(reservation)
        if body is None and self._object_keys[reservation]:
            body = await self._reservations.fetch(self._communicator, reservation)
        if body is not None and body.requester_id != self._cluster_id:
            return
        if body is None or body.status.phase not in UNFINISHED_PHASES:
            await self._finish(reservation, body)
            return
        if body.status.phase in LIVE_PHASES:
            await self._apply(body)
        await self._track_expiry(body)

    # -- live reservations

    async def _apply(self, body: bodies.Reservation) -> None:
        wanted = reservation_instruction(body, self._namespace, self._namespaces(body.id))
        wanted = replace(wanted, metadata=replace(wanted.metadata, finalizers=self._finalizers))
        found = self._watched.get(body.id)
        # Most changes are of the status, by this agent itself: what the watch has shown is enough for them.
        if (
            found is None
            or not found.status.delivered
            or (found.key, found.spec) != (wanted.key, wanted.spec)
        ):
            found = await controller.apply_object(self._objects, wanted, self._record_provider)
        updated = await self._update_status(
            found, lambda newest: delivered_status(newest, body, self._clock())
        )
        _log_held(found, updated or found)
        known = self._targets.get(body.id)
        self._targets[body.id] = body.target_cluster_id
        if not found.status.delivered:
            log.info("ReservationInstruction delivered", **instruction_log_keys(found))
        elif known not in (None, body.target_cluster_id):
            keys = instruction_log_keys(found)
            log.info("ReservationInstruction moved", **keys, previous_cluster=known)
            self._emit(EventRecord("Normal", "Moved", found.spec.message, found))
        for misplaced in self._object_keys[body.id] - {found.key}:
            await self._objects.delete(ReservationInstruction, misplaced)

    async def _record_provider(self, found: ReservationInstruction) -> None:
        """Before the spec names another one: the peering may be connected with it and not have reported."""
        if self._finalizers and conditions.find(found.status.conditions, conditions.PEERED) is None:
            await self._update_status(found, conditions.with_started)

    def _namespaces(self, reservation: str) -> tuple[str, ...]:
        """Those of its request. While that is not known, as after a restart, those of the object stay."""
        found = self._offload_lookup(reservation)
        known = self._watched.get(reservation)
        if found is None and known is not None:
            return known.spec.namespaces
        return found or ()

    async def _track_expiry(self, body: bodies.Reservation) -> None:
        self._expiry.observe(body)
        if self._expiry.remaining(body.id) == timedelta():
            await self._reservations.fetch(self._communicator, body.id)
            self._expiry.recheck(body.id)
        left = self._expiry.remaining(body.id)
        if left is not None:
            self.queue.add_after(body.id, left)

    # -- finished reservations

    async def _finish(self, reservation: str, body: bodies.Reservation | None) -> None:
        self._expiry.forget(reservation)
        objects = [
            await self._objects.find(ReservationInstruction, key)
            for key in sorted(self._object_keys[reservation])
        ]
        left = [found for found in objects if found is not None]
        for found in left:
            await self._finish_object(found, body)
        if not left:
            self._evict_later(reservation)

    async def _finish_object(
        self, found: ReservationInstruction, body: bodies.Reservation | None
    ) -> None:
        now = self._clock()
        written = await self._update_status(
            found, lambda newest: finished_instruction_status(newest, body, now)
        )
        if written is not None and found.status.finished_at is None:
            keys = instruction_log_keys(found)
            log.info("ReservationInstruction finished", **keys, reason=written.status.message)
        finished_at = None if written is None else written.status.finished_at
        left = (finished_at or now) + self._finished_ttl - now
        if left > timedelta():
            self.queue.add_after(found.metadata.name, left)
        else:
            await self._objects.delete(ReservationInstruction, found.key)
            log.debug("ReservationInstruction deleted", **instruction_log_keys(found))

    async def _update_status(
        self, found: ReservationInstruction, change: StatusChange
    ) -> ReservationInstruction | None:
        return await controller.update_status(
            self._objects, found, change, self._clock, self._on_written, is_current=True
        )

    def _evict_later(self, reservation: str) -> None:
        """Retained for a while, so that a late outdated update still finds the newer state in the cache."""
        self._object_keys.pop(reservation, None)  # a new list may have arrived in the meantime
        now = asyncio.get_running_loop().time()
        over_since = self._finished_since.setdefault(reservation, now)
        left = over_since + self._finished_ttl.total_seconds() - now
        if left > 0:
            self.queue.add_after(reservation, timedelta(seconds=left))
        else:
            del self._finished_since[reservation]
            self._targets.pop(reservation, None)
            self._reservations.remove(reservation)


def _log_held(before: ReservationInstruction, after: ReservationInstruction) -> None:
    """What the provider reports, if it has changed."""
    was = conditions.find(before.status.conditions, conditions.HELD)
    now = conditions.find(after.status.conditions, conditions.HELD)
    if now is not None and (was is None or was.reason != now.reason):
        write = log.info if now.status == "True" else log.warning
        keys = {"reservation": after.metadata.name, "cluster": after.spec.target_cluster_id}
        write("Provider reported its hold", **keys, reason=f"{now.reason}: {now.message}")


def _reported_fields(found: ReservationInstruction) -> tuple[object, ...]:
    """The fields that the conditions of the ResourceRequest follow."""
    status = found.status
    return found.spec.target_cluster_id, status.conditions, status.peered_cluster_ids


StatusChange = Callable[[ReservationInstruction], ReservationInstructionStatus]


def instruction_log_keys(found: ReservationInstruction) -> dict[str, str]:
    spec = found.spec
    return {
        "namespace": found.metadata.namespace,
        "name": found.metadata.name,
        "reservation": spec.reservation_name,
        "cluster": spec.target_cluster_id,
        "cpu": str(spec.requested_cpu),
        "memory": str(spec.requested_memory),
        "expires_at": time_text(spec.expires_at),
    }


def time_text(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat()


def reservation_instruction(
    body: bodies.Reservation, namespace: str, namespaces: tuple[str, ...] = ()
) -> ReservationInstruction:
    """The object for a live reservation, without a status."""
    amounts = quantities.parse_requested(body.requested_resources, "requestedResources")
    spec = ReservationInstructionSpec(
        *quantities.requested_fields(amounts),
        reservation_name=body.id,
        target_cluster_id=body.target_cluster_id,
        message=f"Use {body.target_cluster_id} for {amounts.describe()}",
        expires_at=body.status.expires_at,
        cost=body.cost,
        namespaces=namespaces,
    )
    return ReservationInstruction(Metadata(body.id, namespace), spec)


def delivered_status(
    known: ReservationInstruction, body: bodies.Reservation, now: datetime
) -> ReservationInstructionStatus:
    """The spec is up to date with the broker. The peering's part of the status stays."""
    return replace(
        known.status,
        delivered=True,
        observed_reservation_resource_version=str(body.revision),
        conditions=conditions.apply_hold_report(known, body.status.held, now),
    )


def finished_instruction_status(
    known: ReservationInstruction, body: bodies.Reservation | None, now: datetime
) -> ReservationInstructionStatus:
    """The reservation has finished, or the broker does not know it. `now` is the agent's time, from
    which the retention counts. A status that is finished already stays unchanged.
    """
    if known.status.finished_at is not None:
        return known.status
    message = "Reservation not found on the broker" if body is None else body.status.message
    return conditions.apply_finished(known, message, now)


RENEWAL_DIVISOR: Final = 3
"""Renew when a third of the duration is left, which leaves time for many attempts."""
RENEWAL_JITTER_DIVISOR: Final = 30
"""And up to a thirtieth of the duration earlier, so that reservations made together are not renewed
together."""
RECHECK_INTERVAL: Final = timedelta(minutes=1)
"""After the broker reported a reservation as live that should have expired by the local count."""

_ZERO: Final = timedelta()


def renewal_margin(duration: timedelta, chance: float) -> timedelta:
    """How much of a duration is left when it is renewed; `chance` is from 0 to 1."""
    return duration / RENEWAL_DIVISOR + duration / RENEWAL_JITTER_DIVISOR * chance


class ExpiryTracker:
    """Expiry times in the event loop's time."""

    def __init__(self, clock: Callable[[], datetime], chance: Callable[[], float]) -> None:
        self._clock = clock
        self._chance = chance
        self._entries: dict[str, _ExpiryEntry] = {}

    def confirm(self, body: bodies.Reservation) -> None:
        """The broker has just restarted the duration because of the agent's own call."""
        duration = _reservation_duration(body)
        if duration is None or body.status.expires_at is None:
            return
        self._entries[body.id] = self._new_entry(
            body.status.expires_at, duration, duration, is_exact=True
        )

    def observe(self, body: bodies.Reservation) -> None:
        """The broker reports this expiry, or end of the queueing time. A changed end shifts the local one."""
        end = body.status.expires_at or body.status.wait_until
        duration = _reservation_duration(body)
        known = self._entries.get(body.id)
        if end is None:
            self.forget(body.id)
        elif known is None or (known.duration == _ZERO) != (duration is None):
            left = max(end - self._clock(), _ZERO)
            left = left if duration is None else min(left, duration)
            self._entries[body.id] = self._new_entry(end, left, duration or _ZERO, is_exact=False)
        elif known.end != end:
            moved = (end - known.end).total_seconds()
            self._entries[body.id] = replace(known, end=end, ends_at=known.ends_at + moved)

    def recheck(self, reservation: str) -> None:
        """The broker reports it as live: the local count was wrong by an unknown amount."""
        known = self._entries.get(reservation)
        if known is not None:
            ends_at = _loop_time() + RECHECK_INTERVAL.total_seconds()
            self._entries[reservation] = replace(known, ends_at=ends_at)

    def forget(self, reservation: str) -> None:
        self._entries.pop(reservation, None)

    def remaining(self, reservation: str) -> timedelta | None:
        """Until it expires or its queueing time ends; zero if that has passed, None if it has no end."""
        known = self._entries.get(reservation)
        if known is None:
            return None
        return max(timedelta(seconds=known.ends_at - _loop_time()), _ZERO)

    def time_to_renewal(self, reservation: str) -> timedelta | None:
        """Until the renewal is due; due at once if the remaining time is not known exactly."""
        known, left = self._entries.get(reservation), self.remaining(reservation)
        if known is None or left is None or known.duration == _ZERO:
            return None
        return max(left - known.renewal_margin, _ZERO) if known.is_exact else _ZERO

    def _new_entry(
        self, end: datetime, remaining: timedelta, duration: timedelta, *, is_exact: bool
    ) -> _ExpiryEntry:
        ends_at = _loop_time() + remaining.total_seconds()
        return _ExpiryEntry(
            end, ends_at, duration, renewal_margin(duration, self._chance()), is_exact
        )


class _ExpiryEntry(msgspec.Struct, frozen=True):
    end: datetime
    """In the broker's time."""
    ends_at: float
    """In the event loop's time."""
    duration: timedelta
    """Zero for a queued reservation, which is not renewed."""
    renewal_margin: timedelta
    is_exact: bool


def _reservation_duration(body: bodies.Reservation) -> timedelta | None:
    if body.status.expires_at is None:
        return None
    try:
        return durations.parse_duration(body.duration)
    except InvalidDuration:  # older brokers do not send it: use the initial duration
        return body.status.expires_at - (body.status.reserved_at or body.created_at)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
