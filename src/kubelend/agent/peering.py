"""The peering: connects this cluster with the providers of its reservations, and disconnects it
afterwards.

A root task of the agent, level-triggered over ReservationInstructions: connect, size, wait until ready,
activate. A finalizer keeps the object until everything is removed, and its status records the providers: an
agent that is killed at any moment finishes after its restart. A reservation that moves is connected to the
new provider before it is disconnected from the previous one, as long as that can be used; one that is
unreachable does not block the next. Without a peering it only reports that: the reservation stays Reserved
until another client activates it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from kubelend.agent import conditions, controller, events
from kubelend.agent.conditions import FINISHED, READY, PeeringReport
from kubelend.agent.controller import LocalCache
from kubelend.agent.health import ComponentHealth, PeerHealth
from kubelend.agent.instructions import instruction_log_keys
from kubelend.agent.ports import (
    BrokerCommunicator,
    Clock,
    LocalObjects,
    Peer,
    Peering,
    Readiness,
)
from kubelend.agent.reservation_cache import LIVE_PHASES, ReservationCache
from kubelend.core import resources
from kubelend.core.errors import KubelendError
from kubelend.core.lifecycle import Phase
from kubelend.kits import tasks
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.wire import bodies, quantities
from kubelend.wire.events import EmitEvent, discard_event
from kubelend.wire.objects import ReservationInstruction, ReservationInstructionStatus

PEERING_FINALIZER: Final = "reservationinstruction.rear.fluidos.eu/peering"


class PeeringKey(NamedTuple):
    """One object's connection to one provider."""

    key: str
    uid: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.key} disconnecting from {self.cluster}"


def peering_target(found: ReservationInstruction, known: bodies.Reservation | None) -> str:
    """The provider to be connected with; empty if there is none now.

    `known` is the latest state of the reservation, which may be newer than the object: if it names
    another provider, the object's is outdated.
    """
    if found.metadata.deletion_timestamp is not None or found.status.phase == FINISHED:
        return ""
    wanted = found.spec.target_cluster_id
    if known is None:
        return wanted
    is_current = known.status.phase in LIVE_PHASES and known.target_cluster_id == wanted
    return wanted if is_current else ""


def unrecorded_provider(found: ReservationInstruction) -> tuple[str, ...]:
    """The provider that an agent may have connected without having recorded it when it was killed."""
    is_marked = PEERING_FINALIZER in found.metadata.finalizers
    is_reported = conditions.find(found.status.conditions, conditions.PEERED) is not None
    wanted = found.spec.target_cluster_id
    return (wanted,) if wanted and is_marked and not is_reported else ()


def peer_for(found: ReservationInstruction, cluster: str) -> Peer:
    """The provider with the reserved resources; `InvalidInput` if the spec is invalid."""
    spec = found.spec
    amounts = quantities.parse_requested(spec.amounts, "spec")
    return Peer(spec.reservation_name, cluster, amounts, spec.namespaces)


class InstructionCache(LocalCache[ReservationInstruction]):
    """ReservationInstructions, also by reservation."""

    def __init__(self, enqueue: Callable[[str], None]) -> None:
        super().__init__(ReservationInstruction, enqueue)
        self._keys_by_reservation: dict[str, str] = {}

    def on_reservation_change(self, reservation: str) -> None:
        key = self._keys_by_reservation.get(reservation)
        if key is not None:
            self._enqueue(key)

    def keys_of_provider(self, cluster: str) -> list[str]:
        """Those of live reservations."""
        return [
            one.key
            for one in self._objects.values()
            if one.spec.target_cluster_id == cluster and one.status.phase != FINISHED
        ]

    def on_update(self, found: ReservationInstruction) -> None:
        super().on_update(found)
        self._keys_by_reservation[found.spec.reservation_name] = found.key

    def on_delete(self, gone: ReservationInstruction) -> None:
        super().on_delete(gone)
        if self._keys_by_reservation.get(gone.spec.reservation_name) == gone.key:
            del self._keys_by_reservation[gone.spec.reservation_name]

    def trigger_fields(self, found: ReservationInstruction) -> tuple[object, ...]:
        return *super().trigger_fields(found), found.status.phase == FINISHED


log = structlog.get_logger("kubelend.agent")

ACKNOWLEDGE_TIMEOUT: Final = timedelta(seconds=30)
"""How long to wait for the provider's acknowledgement after the peering is ready."""


COMPONENT: Final = "peering"
MIN_POLL_INTERVAL, MAX_POLL_INTERVAL = timedelta(milliseconds=500), timedelta(seconds=10)
REPORT_DELAY: Final = timedelta(seconds=1)
"""Steps of a connection that take less are not reported: writes would only delay them."""
DISCONNECT_POLL_INTERVAL: Final = timedelta(seconds=1)
READY_CHECK_INTERVAL: Final = timedelta(minutes=1)
"""How often a ready peering is checked again."""
HANDOVER_TIMEOUT: Final = timedelta(minutes=2)
"""How long the previous provider of a moved reservation is used while the new one is not ready. It has taken
back what it lent, and may lend it to others."""


class PeeringReconciler:
    """Use `run` as a root task."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        peering: Peering | None,
        health: ComponentHealth,
        clock: Clock,
        *,
        check_interval: timedelta = READY_CHECK_INTERVAL,
        acknowledge_timeout: timedelta = ACKNOWLEDGE_TIMEOUT,
        handover_timeout: timedelta = HANDOVER_TIMEOUT,
        emit: EmitEvent = discard_event,
    ) -> None:
        """`peering` is None if none is configured."""
        self._objects = objects
        self._communicator = communicator
        self._reservations = reservations
        self._peering = peering
        self._clock = clock
        self._emit = emit
        self._on_written = controller.emit_all(emit, events.instruction_events)
        self._check_interval = check_interval
        self._handover_timeout = handover_timeout.total_seconds()
        self._moving_since: dict[str, float] = {}
        """When a moved reservation was found to have a previous provider, in the event loop's time."""
        self._connect_queue = ReconcileQueue(
            COMPONENT, self._reconcile, log, on_failure=self._on_connect_failed
        )
        self._disconnect_queue = ReconcileQueue(
            COMPONENT, self._disconnect, log, on_failure=self._on_disconnect_failed
        )
        self._cache = InstructionCache(self._connect_queue.add)
        self._connected: defaultdict[str, set[str]] = defaultdict(set)
        """Providers connected by this process, by the object's UID: a status write may have been lost."""
        self._disconnecting: dict[PeeringKey, ReservationInstruction] = {}
        self._steps: dict[PeeringKey, str] = {}
        """The last reported step of each disconnection."""
        self._poll_counts: dict[str, int] = {}
        self._report_due: dict[str, float] = {}
        """When the next step of a connection is reported, in the event loop's time."""
        self._acknowledge_timeout = acknowledge_timeout.total_seconds()
        self._ready_since: dict[str, tuple[str, float]] = {}
        """The provider whose acknowledgement is awaited, and since when, in the event loop's time."""
        self._health = PeerHealth(health, COMPONENT)
        reservations.subscribe(self._cache.on_reservation_change)
        reservations.on_reconnect(self._connect_queue.retry_now)

    async def run(self) -> None:
        """Connect and disconnect. Runs until cancelled."""
        watching = controller.watch_objects(
            self._objects,
            ReservationInstruction,
            self._cache.handle_event,
            self._health.set_common_error,
        )
        await tasks.run_all(
            {
                "watch": watching,
                "changes": self._watch_peering(),
                "connect": self._connect_queue.run(),
                "disconnect": self._disconnect_queue.run(),
            }
        )

    async def _watch_peering(self) -> None:
        if self._peering is None:
            await asyncio.Event().wait()
        else:
            await self._peering.watch(self.on_peering_change)

    def on_peering_change(self, name: str) -> None:
        """The peering of a reservation, or with a provider, may have changed."""
        self._cache.on_reservation_change(name)
        for key in self._cache.keys_of_provider(name):
            self._connect_queue.add(key)
        for disconnecting in self._disconnecting:
            if disconnecting.cluster == name or disconnecting.key.endswith(f"/{name}"):
                self._disconnect_queue.add(disconnecting)

    # -- connecting

    async def _reconcile(self, key: str) -> None:
        # Only here and not on the event itself: a connect may still be running for the same key.
        for gone in self._cache.tombstones(key):
            self._disconnect_all(gone)
            self._cache.forget(gone)
        # What the watch has shown is enough: a write of an old version is rejected, and then read again.
        found = self._cache.find(key) or await self._objects.find(ReservationInstruction, key)
        wanted = "" if found is None else self._target(found)
        if not wanted:
            self._poll_counts.pop(key, None)
            self._report_due.pop(key, None)
            self._ready_since.pop(key, None)
            self._moving_since.pop(key, None)
            self._health.clear(key, _not_activated_key(key))
        if found is None:
            return
        if not wanted:
            if not self._disconnect_all(found):
                await self._remove_finalizer(found)
            return
        if not await self._is_handing_over(found, wanted):
            self._disconnect_all(found, except_cluster=wanted)
        if not self._is_disconnecting(key, wanted):
            await self._connect(found, wanted)

    async def _is_handing_over(self, found: ReservationInstruction, wanted: str) -> bool:
        """Whether pods still run with the previous provider, because the new one is not ready."""
        previous = [one for one in found.status.peered_cluster_ids if one != wanted]
        is_ready = found.status.phase == READY and wanted in found.status.peered_cluster_ids
        if self._peering is None or is_ready or not previous:
            self._moving_since.pop(found.key, None)
            return False
        now = asyncio.get_running_loop().time()
        if now - self._moving_since.setdefault(found.key, now) >= self._handover_timeout:
            return False
        usable = [await self._peering.ready(peer_for(found, one)) for one in previous]
        return any(one.is_ready for one in usable)

    def _is_disconnecting(self, key: str, cluster: str) -> bool:
        """Whether the object, or a deleted one with the same key, is being disconnected from that cluster."""
        return any((each.key, each.cluster) == (key, cluster) for each in self._disconnecting)

    async def _connect(self, found: ReservationInstruction, wanted: str) -> None:
        """Create what is missing, and report the readiness."""
        if self._peering is None:
            body = self._reservations.find(found.spec.reservation_name)
            is_active = body is not None and body.status.phase == Phase.ACTIVE
            await self._report(found, wanted, conditions.report_no_peering(is_active=is_active))
            return
        peer = peer_for(found, wanted)
        is_marked = PEERING_FINALIZER in found.metadata.finalizers
        marked = found if is_marked else await self._record_provider(found, wanted)
        if marked is None:
            return
        # An object with the finalizer that reports nothing yet is disconnected from its provider, too: that
        # need not be recorded before it is connected.
        self._connected[found.metadata.uid].add(wanted)
        establishing = asyncio.ensure_future(_establish(self._peering, peer))
        try:
            if not (await asyncio.wait([establishing], timeout=REPORT_DELAY.total_seconds()))[0]:
                marked = await self._record_provider(marked, wanted)
            readiness = await establishing
        finally:
            establishing.cancel()
        if marked is not None:
            await self._record_readiness(marked, wanted, readiness)

    async def _record_provider(
        self, found: ReservationInstruction, wanted: str
    ) -> ReservationInstruction | None:
        """Record the provider in the status; None if the object has changed since."""
        marked: ReservationInstruction | None = found
        if PEERING_FINALIZER not in found.metadata.finalizers:
            marked = await controller.add_finalizer(self._objects, found, PEERING_FINALIZER)
        if marked is None:
            return None
        if wanted not in marked.status.started_cluster_ids:
            report = conditions.report_connecting(wanted)
            changed = await self._report(marked, wanted, report, is_started=True)
            if changed is None or self._target(changed) != wanted:
                return None
            log.info("Peering started", **_log_keys(marked, wanted))
            marked = changed
        return marked

    async def _record_readiness(
        self, found: ReservationInstruction, wanted: str, readiness: Readiness
    ) -> None:
        if not readiness.is_ready and (left := self._time_to_report(found)):
            self._connect_queue.add_after(found.key, left)
            return
        report = conditions.report_readiness(readiness)
        changed = await self._report(found, wanted, report, is_started=True, is_current=True)
        if changed is None or self._target(changed) != wanted:
            return
        self._health.clear(found.key)
        keys, was_ready = _log_keys(found, wanted), found.status.phase == READY
        if readiness.is_ready:
            if not was_ready:
                log.info("Peering ready", **keys, reason=readiness.reason)
            self._poll_counts.pop(found.key, None)
            self._report_due.pop(found.key, None)
            self._disconnect_all(changed, except_cluster=wanted)
            await self._activate(found)
            return
        if was_ready:
            log.warning("Peering no longer ready, will retry", **keys, reason=readiness.reason)
        polls = self._poll_counts[found.key] = self._poll_counts.get(found.key, -1) + 1
        pause = min(MIN_POLL_INTERVAL * 2 ** min(polls, 10), MAX_POLL_INTERVAL)
        self._connect_queue.add_after(found.key, pause)

    def _time_to_report(self, found: ReservationInstruction) -> timedelta:
        """How long to wait before the next step of a connection is reported; most are over by then."""
        now, delay = asyncio.get_running_loop().time(), REPORT_DELAY.total_seconds()
        due = self._report_due.setdefault(found.key, now + delay)
        if now < due and found.status.phase != READY:
            return timedelta(seconds=due - now)
        self._report_due[found.key] = now + delay
        return timedelta()

    async def _activate(self, found: ReservationInstruction) -> None:
        """Activate the reservation once its provider has acknowledged it or has had its time to."""
        body = self._reservations.find(found.spec.reservation_name)
        left = timedelta()
        if body is not None and body.status.phase == Phase.RESERVED:
            left = self._acknowledgement_wait(found.key, body)
            try:
                if not left:
                    await self._reservations.update(self._communicator.activate(body.id))
                    keys = {"reservation": body.id, "cluster": body.target_cluster_id}
                    log.info("Reservation activated", **keys)
            except KubelendError as error:
                self._health.set_error(_not_activated_key(found.key), str(error))
                self._connect_queue.retry(found.key)
                return
        self._health.clear(_not_activated_key(found.key))
        next_check = min(left or self._check_interval, self._check_interval)
        self._connect_queue.add_after(found.key, next_check)

    def _acknowledgement_wait(self, key: str, body: bodies.Reservation) -> timedelta:
        """How long to wait for the provider's acknowledgement; zero if there is no need to."""
        if body.status.acknowledged_at is not None:
            return timedelta()
        now, cluster = asyncio.get_running_loop().time(), body.target_cluster_id
        if self._ready_since.get(key, ("", 0.0))[0] != cluster:
            self._ready_since[key] = (cluster, now)
        ready_since = self._ready_since[key][1]
        return timedelta(seconds=max(ready_since + self._acknowledge_timeout - now, 0))

    async def _on_connect_failed(self, key: str, error: KubelendError) -> None:
        self._health.set_error(key, str(error))
        found = self._cache.find(key)
        if found is not None and (wanted := self._target(found)):
            with contextlib.suppress(KubelendError):
                await self._report(found, wanted, conditions.report_failure(error))

    # -- disconnecting

    def _disconnect_all(self, found: ReservationInstruction, except_cluster: str = "") -> bool:
        """Disconnect from all recorded providers but one; False if there are none."""
        uid = found.metadata.uid
        recorded = (*found.status.started_cluster_ids, *found.status.peered_cluster_ids)
        clusters = {*self._connected.get(uid, ()), *recorded, *unrecorded_provider(found)}
        clusters.discard(except_cluster)
        for cluster in sorted(clusters):
            peering_key = PeeringKey(found.key, uid, cluster)
            if peering_key not in self._disconnecting:
                self._disconnecting[peering_key] = found
                self._disconnect_queue.add(peering_key)
                log.info("Peering disconnecting", **_log_keys(found, cluster))
        return bool(clusters)

    async def _disconnect(self, key: PeeringKey) -> None:
        found = self._disconnecting.get(key)
        if found is None:
            return
        # It needs the names only, so that an invalid spec can be disconnected too.
        peer = Peer(found.spec.reservation_name, key.cluster, resources.NOTHING)
        if self._peering is None:
            keys = _log_keys(found, key.cluster)
            log.warning("No peering is configured; objects of an earlier one are left", **keys)
        else:
            readiness = await self._peering.disconnect(peer)
            if not readiness.is_ready:
                await self._report_step(key, found, readiness)
                self._disconnect_queue.add_after(key, DISCONNECT_POLL_INTERVAL)
                return
        await self._update_status(
            found, lambda newest: conditions.apply_disconnected(newest, key.cluster, self._clock())
        )
        self._connected[key.uid].discard(key.cluster)
        if not self._connected[key.uid]:
            del self._connected[key.uid]
        del self._disconnecting[key]
        self._steps.pop(key, None)
        self._health.clear(str(key))
        log.info("Peering disconnected", **_log_keys(found, key.cluster))
        self._connect_queue.add(key.key)

    async def _report_step(
        self, key: PeeringKey, found: ReservationInstruction, readiness: Readiness
    ) -> None:
        """Log it, and record it in an Event, and in the status if no other provider is wanted."""
        if not readiness.step:
            return
        await self._update_status(
            found, lambda newest: self._with_step(newest, key.cluster, readiness)
        )
        if self._steps.get(key) == readiness.step:
            return
        self._steps[key] = readiness.step
        event = events.disconnect_event(readiness, key.cluster, found)
        if event is not None:
            self._emit(event)
            write = log.warning if event.type == "Warning" else log.info
            write("Peering disconnecting", **_log_keys(found, key.cluster), reason=readiness.reason)

    def _with_step(
        self, newest: ReservationInstruction, cluster: str, readiness: Readiness
    ) -> ReservationInstructionStatus:
        if self._target(newest):
            return newest.status
        return conditions.apply_disconnecting(newest, cluster, readiness, self._clock())

    async def _on_disconnect_failed(self, key: PeeringKey, error: KubelendError) -> None:
        self._health.set_error(str(key), str(error))
        with contextlib.suppress(KubelendError):
            await self._update_status(
                self._disconnecting[key], lambda newest: self._with_message(newest, str(error))
            )

    async def _remove_finalizer(self, found: ReservationInstruction) -> None:
        """Nothing is connected: the object may be deleted, or wait for another provider."""
        if PEERING_FINALIZER not in found.metadata.finalizers:
            return
        changed = await self._report(found, "", conditions.report_no_provider())
        if changed is not None:
            await controller.remove_finalizer(self._objects, changed, PEERING_FINALIZER)

    # -- status

    def _target(self, found: ReservationInstruction) -> str:
        return peering_target(found, self._reservations.find(found.spec.reservation_name))

    async def _report(
        self,
        found: ReservationInstruction,
        wanted: str,
        report: PeeringReport,
        *,
        is_started: bool = False,
        is_current: bool = False,
    ) -> ReservationInstruction | None:
        """Write what the peering reports about a provider to the current status; None if the object is gone.

        A report about another provider than the one wanted now is outdated, and the status of a finished
        object is not the peering's to write. `is_started` records the provider in any case.
        """

        def change(newest: ReservationInstruction) -> ReservationInstructionStatus:
            if is_started:
                newest = replace(newest, status=conditions.with_started(newest, wanted))
            if newest.status.phase == FINISHED or self._target(newest) != wanted:
                return newest.status
            return conditions.apply_report(newest, wanted, report, self._clock())

        return await self._update_status(found, change, is_current=is_current)

    def _with_message(
        self, newest: ReservationInstruction, message: str
    ) -> ReservationInstructionStatus:
        """Why it cannot be disconnected, while no provider is wanted."""
        if newest.status.phase == FINISHED or self._target(newest):
            return newest.status
        return replace(newest.status, message=message)

    async def _update_status(
        self,
        found: ReservationInstruction,
        change: Callable[[ReservationInstruction], ReservationInstructionStatus],
        *,
        is_current: bool = False,
    ) -> ReservationInstruction | None:
        return await controller.update_status(
            self._objects, found, change, self._clock, self._on_written, is_current=is_current
        )


async def _establish(peering: Peering, peer: Peer) -> Readiness:
    """Take all steps that are possible now; returns what is missing after them."""
    for step in (peering.connect, peering.size):
        readiness = await step(peer)
        if not readiness.is_ready:
            return readiness
    return await peering.ready(peer)


def _log_keys(found: ReservationInstruction, cluster: str) -> dict[str, str]:
    keys = instruction_log_keys(found) | {"cluster": cluster}
    del keys["expires_at"]
    return keys


def _not_activated_key(key: str) -> str:
    """The health key of a peering that is ready while its reservation is not activated."""
    return f"{key} is ready, but not activated"
