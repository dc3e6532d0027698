"""The peering: connects this cluster with the providers of its reservations, and disconnects it
afterwards.

A root task of the agent, level-triggered over ReservationInstructions: connect, size, wait until ready,
activate. The provider is recorded in the object's status before anything is created, and a finalizer
keeps the object until everything is removed: an agent that is killed at any moment finishes after its
restart. An unreachable provider, from which a reservation was failed over, does not block the
connection to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from kubelend.agent import controller, reservation_cache
from kubelend.agent.controller import RetryQueue, watch_objects
from kubelend.agent.health import ComponentHealth, PeerHealth
from kubelend.agent.ports import (
    BrokerCommunicator,
    Clock,
    Deleted,
    Listed,
    LocalObjects,
    Peer,
    Peering,
    Readiness,
)
from kubelend.agent.reservation_cache import LIVE_PHASES, ReservationCache
from kubelend.core import resources
from kubelend.core.errors import InvalidInput, KubelendError
from kubelend.core.lifecycle import Phase
from kubelend.kits import tasks
from kubelend.wire import bodies, quantities
from kubelend.wire.objects import ReservationInstruction, ReservationInstructionStatus

PEERING_FINALIZER: Final = "reservationinstruction.rear.fluidos.eu/peering"
CONNECTING, READY, FINISHED = "Connecting", "Ready", "Finished"


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


def peer_for(found: ReservationInstruction, cluster: str) -> Peer:
    """The provider with the reserved resources; `InvalidInput` if the spec is invalid."""
    spec = found.spec
    return Peer(spec.reservation_name, cluster, quantities.parse_requested(spec.amounts, "spec"))


def peer_to_disconnect(found: ReservationInstruction, cluster: str) -> Peer:
    """The provider to disconnect from, which needs the names only."""
    try:
        return peer_for(found, cluster)
    except InvalidInput:
        return Peer(found.spec.reservation_name, cluster, resources.NOTHING)


def with_peered_cluster(found: ReservationInstruction, cluster: str) -> tuple[str, ...]:
    """The recorded providers, with this one added."""
    known = found.status.peered_cluster_ids
    return known if cluster in known else (*known, cluster)


def without_peered_cluster(found: ReservationInstruction, cluster: str) -> tuple[str, ...]:
    return tuple(other for other in found.status.peered_cluster_ids if other != cluster)


def trigger_fields(found: ReservationInstruction) -> tuple[object, ...]:
    """The fields that trigger a reconcile. The peering's own status writes are not among them."""
    known = found.metadata
    is_finished = found.status.phase == FINISHED
    return known.uid, known.generation, known.deletion_timestamp, is_finished


class InstructionCache:
    """Fed by the watch. `enqueue` is called with the keys to reconcile."""

    def __init__(self, enqueue: Callable[[str], None]) -> None:
        self._enqueue = enqueue
        self._objects: dict[str, ReservationInstruction] = {}
        self._keys_by_reservation: dict[str, str] = {}
        """The object key of each reservation."""
        self._deleted: defaultdict[str, list[ReservationInstruction]] = defaultdict(list)

    def handle_event(self, event: ReservationInstruction | Deleted | Listed) -> None:
        """Handle a watch event."""
        match event:
            case Listed(objects):
                there = [one for one in objects if isinstance(one, ReservationInstruction)]
                for gone in self._objects.keys() - {one.key for one in there}:
                    self._on_delete(self._objects[gone])
                for one in there:
                    self._on_update(one)
            case Deleted(found):
                if isinstance(found, ReservationInstruction):
                    self._on_delete(found)
            case found:
                self._on_update(found)

    def on_reservation_change(self, reservation: str) -> None:
        """The reservation has changed."""
        key = self._keys_by_reservation.get(reservation)
        if key is not None:
            self._enqueue(key)

    def find(self, key: str) -> ReservationInstruction | None:
        """The last watched state."""
        return self._objects.get(key)

    def pop_deleted(self, key: str) -> list[ReservationInstruction]:
        """Deleted objects of this key, returned once: another client may have removed the finalizer."""
        return self._deleted.pop(key, [])

    def _on_update(self, found: ReservationInstruction) -> None:
        known = self._objects.get(found.key)
        if known is not None and known.metadata.uid != found.metadata.uid:
            self._on_delete(known)
        self._objects[found.key] = found
        self._keys_by_reservation[found.spec.reservation_name] = found.key
        # The peering's own status writes must not trigger a reconcile: they would cut retry pauses short.
        if known is None or trigger_fields(known) != trigger_fields(found):
            self._enqueue(found.key)

    def _on_delete(self, gone: ReservationInstruction) -> None:
        self._objects.pop(gone.key, None)
        if self._keys_by_reservation.get(gone.spec.reservation_name) == gone.key:
            del self._keys_by_reservation[gone.spec.reservation_name]
        self._deleted[gone.key].append(gone)
        self._enqueue(gone.key)


log = structlog.get_logger("kubelend.agent")

ACKNOWLEDGE_TIMEOUT: Final = timedelta(seconds=30)
"""How long to wait for the provider's acknowledgement after the peering is ready."""


class Activator:
    """Activates reservations that the cache has as Reserved."""

    def __init__(
        self,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        acknowledge_timeout: timedelta,
    ) -> None:
        self._communicator = communicator
        self._reservations = reservations
        self._acknowledge_timeout = acknowledge_timeout.total_seconds()
        self._ready_since: dict[str, _ReadySince] = {}

    def acknowledgement_wait(self, found: ReservationInstruction) -> timedelta:
        """How long to wait for the provider's acknowledgement; zero if there is no need to."""
        body = self._unactivated(found)
        if body is None or body.status.acknowledged_at is not None:
            return timedelta()
        now = asyncio.get_running_loop().time()
        ready = self._ready_since.get(found.key)
        if ready is None or ready.cluster != body.target_cluster_id:
            ready = self._ready_since[found.key] = _ReadySince(body.target_cluster_id, now)
        return timedelta(seconds=max(ready.since + self._acknowledge_timeout - now, 0))

    async def activate(self, found: ReservationInstruction) -> None:
        body = self._unactivated(found)
        if body is not None:
            sent_at = self._reservations.sequence()
            used = await reservation_cache.with_timeout(self._communicator.activate(body.id))
            self._reservations.put(used, sent_at)
            log.info("Reservation activated", reservation=body.id, cluster=body.target_cluster_id)

    def forget(self, key: str) -> None:
        """The object has nothing to activate any more."""
        self._ready_since.pop(key, None)

    def _unactivated(self, found: ReservationInstruction) -> bodies.Reservation | None:
        known = self._reservations.find(found.spec.reservation_name)
        is_reserved = known is not None and known.status.phase == Phase.RESERVED.value
        return known if is_reserved else None


class _ReadySince(NamedTuple):
    cluster: str
    since: float
    """In the event loop's time."""


COMPONENT: Final = "peering"
MIN_POLL_INTERVAL, MAX_POLL_INTERVAL = timedelta(milliseconds=500), timedelta(seconds=10)
READY_CHECK_INTERVAL: Final = timedelta(minutes=1)
"""How often a ready peering is checked again."""


class PeeringReconciler:
    """Use `run` as a root task."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        peering: Peering,
        health: ComponentHealth,
        clock: Clock,
        *,
        check_interval: timedelta = READY_CHECK_INTERVAL,
        acknowledge_timeout: timedelta = ACKNOWLEDGE_TIMEOUT,
    ) -> None:
        self._objects = objects
        self._reservations = reservations
        self._peering = peering
        self._clock = clock
        self._check_interval = check_interval
        self._connect_queue = RetryQueue(self._reconcile, self._on_connect_failed)
        self._disconnect_queue = RetryQueue(self._disconnect, self._on_disconnect_failed)
        self._cache = InstructionCache(self._connect_queue.add)
        self._connected: defaultdict[str, set[str]] = defaultdict(set)
        """Providers connected by this process, by the object's UID: a status write may have been
        lost."""
        self._disconnecting: dict[PeeringKey, ReservationInstruction] = {}
        self._poll_counts: dict[str, int] = {}
        self._activator = Activator(communicator, reservations, acknowledge_timeout)
        self._health = PeerHealth(health, COMPONENT)
        reservations.subscribe(self._cache.on_reservation_change)
        reservations.on_reconnect(self._connect_queue.retry_now)

    async def run(self) -> None:
        """Connect and disconnect. Runs until cancelled."""
        kind = ReservationInstruction
        watching = watch_objects(
            self._objects,
            kind,
            self._cache.handle_event,
            self._health.set_common_error,
            random.random,
        )
        await tasks.run_all(
            {
                "watch": watching,
                "connect": self._connect_queue.run(),
                "disconnect": self._disconnect_queue.run(),
            }
        )

    # -- connecting

    async def _reconcile(self, key: str) -> None:
        # Only here and not on the event itself: a connect may still be running for the same key.
        for gone in self._cache.pop_deleted(key):
            self._disconnect_all(gone)
        found = await self._objects.find(ReservationInstruction, key)
        wanted = "" if found is None else self._target(found)
        if not wanted:
            self._stop_connecting(key)
        if found is None:
            return
        parting = self._disconnect_all(found, except_cluster=wanted)
        if wanted and not self._is_disconnecting(key, wanted):
            await self._connect(found, wanted)
        elif not wanted and not parting:
            await self._remove_finalizer(found)

    def _stop_connecting(self, key: str) -> None:
        """No provider is wanted for the object now."""
        self._connect_queue.forget(key)
        self._poll_counts.pop(key, None)
        self._activator.forget(key)
        self._health.clear(key, _not_activated_key(key))

    def _is_disconnecting(self, key: str, cluster: str) -> bool:
        """Whether the object, or a deleted one with the same key, is being disconnected from that
        cluster.
        """
        return any(
            (peering_key.key, peering_key.cluster) == (key, cluster)
            for peering_key in self._disconnecting
        )

    async def _connect(self, found: ReservationInstruction, wanted: str) -> None:
        """Create what is missing, and report the readiness."""
        peer = peer_for(found, wanted)
        if await self._record_provider(found, wanted):
            await self._peering.connect(peer)
            await self._peering.size(peer)
            await self._record_readiness(found, wanted, await self._peering.ready(peer))

    async def _record_provider(self, found: ReservationInstruction, wanted: str) -> bool:
        """Record the provider in the status; False if the object has changed since."""
        marked = await controller.add_finalizer(self._objects, found, PEERING_FINALIZER)
        if marked is None:
            return False
        found = marked
        if wanted not in found.status.peered_cluster_ids:
            changed = await self._update_status(
                found, wanted, phase=CONNECTING, message=f"connecting to {wanted}", connected=wanted
            )
            if changed is None or self._target(changed) != wanted:
                return False
            log.info("Peering started", **_peering_log_keys(found, wanted))
        self._connected[found.metadata.uid].add(wanted)
        return True

    async def _record_readiness(
        self, found: ReservationInstruction, wanted: str, readiness: Readiness
    ) -> None:
        phase = READY if readiness.is_ready else CONNECTING
        changed = await self._update_status(found, wanted, phase=phase, message=readiness.reason)
        if changed is None or self._target(changed) != wanted:
            return
        self._health.clear(found.key)
        self._log_readiness(found, wanted, readiness)
        if not readiness.is_ready:
            self._connect_queue.forget(found.key)
            self._requeue_poll(found.key)
        else:
            await self._activate(found)

    def _log_readiness(
        self, found: ReservationInstruction, wanted: str, readiness: Readiness
    ) -> None:
        was_ready = found.status.phase == READY
        keys = _peering_log_keys(found, wanted)
        if readiness.is_ready and not was_ready:
            log.info("Peering ready", **keys, reason=readiness.reason)
        elif was_ready and not readiness.is_ready:
            log.warning("Peering no longer ready, will retry", **keys, reason=readiness.reason)

    def _requeue_poll(self, key: str) -> None:
        polls = self._poll_counts.get(key, 0)
        self._poll_counts[key] = polls + 1
        self._connect_queue.add_after(
            key, min(MIN_POLL_INTERVAL * 2 ** min(polls, 10), MAX_POLL_INTERVAL)
        )

    async def _activate(self, found: ReservationInstruction) -> None:
        """Activate the reservation once its provider has acknowledged it or has had its time to."""
        self._poll_counts.pop(found.key, None)
        left = self._activator.acknowledgement_wait(found)
        try:
            if not left:
                await self._activator.activate(found)
        except KubelendError as error:
            self._health.set_error(_not_activated_key(found.key), str(error))
            self._connect_queue.retry(found.key)
            return
        self._health.clear(_not_activated_key(found.key))
        self._connect_queue.forget(found.key)
        self._connect_queue.add_after(
            found.key, min(left or self._check_interval, self._check_interval)
        )

    async def _on_connect_failed(self, key: str, error: KubelendError) -> None:
        self._health.set_error(key, str(error))
        found = self._cache.find(key)
        if found is not None and (wanted := self._target(found)):
            with contextlib.suppress(KubelendError):
                await self._update_status(found, wanted, phase=CONNECTING, message=str(error))

    # -- disconnecting

    def _disconnect_all(self, found: ReservationInstruction, except_cluster: str = "") -> bool:
        """Disconnect from all recorded providers but one; False if there are none."""
        uid = found.metadata.uid
        clusters = {*self._connected.get(uid, ()), *found.status.peered_cluster_ids} - {
            except_cluster
        }
        for peering_key in (PeeringKey(found.key, uid, cluster) for cluster in sorted(clusters)):
            if peering_key not in self._disconnecting:
                self._disconnecting[peering_key] = found
                self._disconnect_queue.add(peering_key)
                log.info("Peering disconnecting", **_peering_log_keys(found, peering_key.cluster))
        return bool(clusters)

    async def _disconnect(self, key: PeeringKey) -> None:
        found = self._disconnecting.get(key)
        if found is None:
            return
        await self._peering.disconnect(peer_to_disconnect(found, key.cluster))
        await self._update_status(found, "", disconnected=key.cluster)
        self._connected[key.uid].discard(key.cluster)
        if not self._connected[key.uid]:
            del self._connected[key.uid]
        del self._disconnecting[key]
        self._disconnect_queue.forget(key)
        self._health.clear(str(key))
        log.info("Peering disconnected", **_peering_log_keys(found, key.cluster))
        self._connect_queue.add(key.key)

    async def _on_disconnect_failed(self, key: PeeringKey, error: KubelendError) -> None:
        self._health.set_error(str(key), str(error))
        with contextlib.suppress(KubelendError):
            await self._update_status(self._disconnecting[key], "", message=str(error))

    async def _remove_finalizer(self, found: ReservationInstruction) -> None:
        """Nothing is connected: the object may be deleted, or wait for another provider."""
        if PEERING_FINALIZER not in found.metadata.finalizers:
            return
        changed = await self._update_status(
            found, "", phase=CONNECTING, message="no provider assigned"
        )
        if changed is not None:
            await controller.remove_finalizer(self._objects, changed, PEERING_FINALIZER)

    # -- status

    def _target(self, found: ReservationInstruction) -> str:
        return peering_target(found, self._reservations.find(found.spec.reservation_name))

    async def _update_status(
        self,
        found: ReservationInstruction,
        wanted: str,
        *,
        phase: str = "",
        message: str = "",
        connected: str = "",
        disconnected: str = "",
    ) -> ReservationInstruction | None:
        """Update the peering's part of the current status; None if the object is gone.

        A message about another provider than the one wanted now is outdated, and that of a finished
        object is not the peering's to write.
        """

        def status_for(newest: ReservationInstruction) -> ReservationInstructionStatus:
            status = newest.status
            if connected:
                status = replace(status, peered_cluster_ids=with_peered_cluster(newest, connected))
            if disconnected:
                status = replace(
                    status, peered_cluster_ids=without_peered_cluster(newest, disconnected)
                )
            if message and status.phase != FINISHED and self._target(newest) == wanted:
                status = replace(status, phase=phase or status.phase, message=message)
            return status

        return await controller.update_status(self._objects, found, status_for, self._clock)


def _peering_log_keys(found: ReservationInstruction, cluster: str) -> dict[str, str]:
    return {
        "namespace": found.metadata.namespace,
        "name": found.metadata.name,
        "reservation": found.spec.reservation_name,
        "cluster": cluster,
        "cpu": found.spec.requested_cpu,
        "memory": found.spec.requested_memory,
    }


def _not_activated_key(key: str) -> str:
    """The health key of a peering that is ready while its reservation is not activated."""
    return f"{key} is ready, but not activated"
