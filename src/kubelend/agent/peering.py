"""The peering: connects this cluster with the providers of its reservations, and disconnects it
afterwards.

A root task of the agent, level-triggered over ReservationInstructions: connect, size, wait until ready,
activate. The provider is recorded in the object's status before anything is created, and a finalizer
keeps the object until everything is removed: an agent that is killed at any moment finishes after its
restart. An unreachable provider, from which a reservation was failed over, does not block the
connection to the next.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from datetime import timedelta
from typing import Final

import structlog
from msgspec.structs import replace

from kubelend.agent import activation, editing, joints
from kubelend.agent.activation import Activator
from kubelend.agent.crews import RetryQueue
from kubelend.agent.joints import CONNECTING, FINISHED, PEERING_FINALIZER, READY, PeeringKey
from kubelend.agent.looking import watch_objects
from kubelend.agent.ports import (
    BrokerCommunicator,
    Clock,
    LocalObjects,
    Peering,
    Readiness,
)
from kubelend.agent.reservations import ReservationCache
from kubelend.agent.roster import InstructionCache
from kubelend.agent.standing import ComponentHealth
from kubelend.agent.troubles import PeerHealth
from kubelend.core.errors import KubelendError
from kubelend.kits import tasks
from kubelend.wire.objects import ReservationInstruction, ReservationInstructionStatus

log = structlog.get_logger("kubelend.agent")

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
        acknowledge_timeout: timedelta = activation.ACKNOWLEDGE_TIMEOUT,
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
        return any((joint.key, joint.cluster) == (key, cluster) for joint in self._disconnecting)

    async def _connect(self, found: ReservationInstruction, wanted: str) -> None:
        """Create what is missing, and report the readiness."""
        peer = joints.peer_for(found, wanted)
        if await self._record_provider(found, wanted):
            await self._peering.connect(peer)
            await self._peering.size(peer)
            await self._record_readiness(found, wanted, await self._peering.ready(peer))

    async def _record_provider(self, found: ReservationInstruction, wanted: str) -> bool:
        """Record the provider in the status; False if the object has changed since."""
        marked = await editing.add_finalizer(self._objects, found, PEERING_FINALIZER)
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
        for joint in (PeeringKey(found.key, uid, cluster) for cluster in sorted(clusters)):
            if joint not in self._disconnecting:
                self._disconnecting[joint] = found
                self._disconnect_queue.add(joint)
                log.info("Peering disconnecting", **_peering_log_keys(found, joint.cluster))
        return bool(clusters)

    async def _disconnect(self, key: PeeringKey) -> None:
        found = self._disconnecting.get(key)
        if found is None:
            return
        await self._peering.disconnect(joints.peer_to_disconnect(found, key.cluster))
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
            await editing.remove_finalizer(self._objects, changed, PEERING_FINALIZER)

    # -- status

    def _target(self, found: ReservationInstruction) -> str:
        return joints.peering_target(found, self._reservations.find(found.spec.reservation_name))

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
                status = replace(
                    status, peered_cluster_ids=joints.with_peered_cluster(newest, connected)
                )
            if disconnected:
                status = replace(
                    status, peered_cluster_ids=joints.without_peered_cluster(newest, disconnected)
                )
            if message and status.phase != FINISHED and self._target(newest) == wanted:
                status = replace(status, phase=phase or status.phase, message=message)
            return status

        return await editing.update_status(self._objects, found, status_for, self._clock)


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
