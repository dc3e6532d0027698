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
from kubelend.agent.activation import Activation
from kubelend.agent.crews import Crew
from kubelend.agent.joints import CONNECTING, FINALIZER, FINISHED, READY, Joint
from kubelend.agent.looking import follow
from kubelend.agent.ports import (
    BrokerCommunicator,
    Clock,
    LocalObjects,
    Peering,
    Readiness,
)
from kubelend.agent.reservations import Reservations
from kubelend.agent.roster import Roster
from kubelend.agent.standing import Standing
from kubelend.agent.troubles import Troubles
from kubelend.core.errors import KubelendError
from kubelend.kits import tasks
from kubelend.wire.objects import ReservationInstruction, ReservationInstructionStatus

log = structlog.get_logger("kubelend.agent")

PART: Final = "peering"
POLL_FIRST, POLL_LONGEST = timedelta(milliseconds=500), timedelta(seconds=10)
CHECK_EVERY: Final = timedelta(minutes=1)
"""How often a ready peering is checked again."""


class PeeringKeeper:
    """Use `run` as a root task."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: Reservations,
        peering: Peering,
        standing: Standing,
        clock: Clock,
        *,
        check_every: timedelta = CHECK_EVERY,
        answered_within: timedelta = activation.ANSWERED_WITHIN,
    ) -> None:
        self._objects = objects
        self._reservations = reservations
        self._peering = peering
        self._clock = clock
        self._check_every = check_every
        self._joining = Crew(self._look, self._not_joined)
        self._parting = Crew(self._part, self._not_parted)
        self._roster = Roster(self._joining.add)
        self._joined: defaultdict[str, set[str]] = defaultdict(set)
        """Providers connected by this process, by the object's UID: a status write may have been
        lost."""
        self._leaving: dict[Joint, ReservationInstruction] = {}
        self._polls: dict[str, int] = {}
        self._activation = Activation(communicator, reservations, answered_within)
        self._troubles = Troubles(standing, PART)
        reservations.listen(self._roster.heard)
        reservations.on_contact(self._joining.hurry)

    async def run(self) -> None:
        """Connect and disconnect. Runs until cancelled."""
        kind = ReservationInstruction
        watching = follow(
            self._objects, kind, self._roster.take, self._troubles.concern_all, random.random
        )
        await tasks.run_all(
            {"watch": watching, "connect": self._joining.run(), "disconnect": self._parting.run()}
        )

    # -- connecting

    async def _look(self, key: str) -> None:
        # Only here and not on the event itself: a connect may still be running for the same key.
        for gone in self._roster.take_gone(key):
            self._leave_all(gone)
        found = await self._objects.find(ReservationInstruction, key)
        wanted = "" if found is None else self._target(found)
        if not wanted:
            self._stop_joining(key)
        if found is None:
            return
        parting = self._leave_all(found, but=wanted)
        if wanted and not self._is_leaving(key, wanted):
            await self._join(found, wanted)
        elif not wanted and not parting:
            await self._let_go(found)

    def _stop_joining(self, key: str) -> None:
        """No provider is wanted for the object now."""
        self._joining.succeeded(key)
        self._polls.pop(key, None)
        self._activation.forget(key)
        self._troubles.end(key, _unused(key))

    def _is_leaving(self, key: str, cluster: str) -> bool:
        """Whether the object, or a deleted one with the same key, is being disconnected from that
        cluster.
        """
        return any((joint.key, joint.cluster) == (key, cluster) for joint in self._leaving)

    async def _join(self, found: ReservationInstruction, wanted: str) -> None:
        """Create what is missing, and report the readiness."""
        peer = joints.peer(found, wanted)
        if await self._begin(found, wanted):
            await self._peering.connect(peer)
            await self._peering.size(peer)
            await self._finish(found, wanted, await self._peering.ready(peer))

    async def _begin(self, found: ReservationInstruction, wanted: str) -> bool:
        """Record the provider in the status; False if the object has changed since."""
        marked = await editing.add_finalizer(self._objects, found, FINALIZER)
        if marked is None:
            return False
        found = marked
        if wanted not in found.status.peered_cluster_ids:
            changed = await self._set(
                found, wanted, phase=CONNECTING, message=f"connecting to {wanted}", joined=wanted
            )
            if changed is None or self._target(changed) != wanted:
                return False
            log.info("Peering started", **_peering_keys(found, wanted))
        self._joined[found.metadata.uid].add(wanted)
        return True

    async def _finish(
        self, found: ReservationInstruction, wanted: str, readiness: Readiness
    ) -> None:
        phase = READY if readiness.is_ready else CONNECTING
        changed = await self._set(found, wanted, phase=phase, message=readiness.reason)
        if changed is None or self._target(changed) != wanted:
            return
        self._troubles.end(found.key)
        self._log_readiness(found, wanted, readiness)
        if not readiness.is_ready:
            self._joining.succeeded(found.key)
            self._poll_later(found.key)
        else:
            await self._use(found)

    def _log_readiness(
        self, found: ReservationInstruction, wanted: str, readiness: Readiness
    ) -> None:
        was_ready = found.status.phase == READY
        keys = _peering_keys(found, wanted)
        if readiness.is_ready and not was_ready:
            log.info("Peering ready", **keys, reason=readiness.reason)
        elif was_ready and not readiness.is_ready:
            log.warning("Peering no longer ready, will retry", **keys, reason=readiness.reason)

    def _poll_later(self, key: str) -> None:
        polls = self._polls.get(key, 0)
        self._polls[key] = polls + 1
        self._joining.add_after(key, min(POLL_FIRST * 2 ** min(polls, 10), POLL_LONGEST))

    async def _use(self, found: ReservationInstruction) -> None:
        """Activate the reservation once its provider has acknowledged it or has had its time to."""
        self._polls.pop(found.key, None)
        left = self._activation.patience(found)
        try:
            if not left:
                await self._activation.activate(found)
        except KubelendError as error:
            self._troubles.begin(_unused(found.key), str(error))
            self._joining.retry(found.key)
            return
        self._troubles.end(_unused(found.key))
        self._joining.succeeded(found.key)
        self._joining.add_after(found.key, min(left or self._check_every, self._check_every))

    async def _not_joined(self, key: str, error: KubelendError) -> None:
        self._troubles.begin(key, str(error))
        found = self._roster.find(key)
        if found is not None and (wanted := self._target(found)):
            with contextlib.suppress(KubelendError):
                await self._set(found, wanted, phase=CONNECTING, message=str(error))

    # -- disconnecting

    def _leave_all(self, found: ReservationInstruction, but: str = "") -> bool:
        """Disconnect from all recorded providers but one; False if there are none."""
        uid = found.metadata.uid
        clusters = {*self._joined.get(uid, ()), *found.status.peered_cluster_ids} - {but}
        for joint in (Joint(found.key, uid, cluster) for cluster in sorted(clusters)):
            if joint not in self._leaving:
                self._leaving[joint] = found
                self._parting.add(joint)
                log.info("Peering disconnecting", **_peering_keys(found, joint.cluster))
        return bool(clusters)

    async def _part(self, joint: Joint) -> None:
        found = self._leaving.get(joint)
        if found is None:
            return
        await self._peering.disconnect(joints.parted(found, joint.cluster))
        await self._set(found, "", parted=joint.cluster)
        self._joined[joint.uid].discard(joint.cluster)
        if not self._joined[joint.uid]:
            del self._joined[joint.uid]
        del self._leaving[joint]
        self._parting.succeeded(joint)
        self._troubles.end(str(joint))
        log.info("Peering disconnected", **_peering_keys(found, joint.cluster))
        self._joining.add(joint.key)

    async def _not_parted(self, joint: Joint, error: KubelendError) -> None:
        self._troubles.begin(str(joint), str(error))
        with contextlib.suppress(KubelendError):
            await self._set(self._leaving[joint], "", message=str(error))

    async def _let_go(self, found: ReservationInstruction) -> None:
        """Nothing is connected: the object may be deleted, or wait for another provider."""
        if FINALIZER not in found.metadata.finalizers:
            return
        changed = await self._set(found, "", phase=CONNECTING, message="no provider assigned")
        if changed is not None:
            await editing.remove_finalizer(self._objects, changed, FINALIZER)

    # -- status

    def _target(self, found: ReservationInstruction) -> str:
        return joints.target(found, self._reservations.find(found.spec.reservation_name))

    async def _set(
        self,
        found: ReservationInstruction,
        wanted: str,
        *,
        phase: str = "",
        message: str = "",
        joined: str = "",
        parted: str = "",
    ) -> ReservationInstruction | None:
        """Update the peering's part of the current status; None if the object is gone.

        A message about another provider than the one wanted now is outdated, and that of a finished
        object is not the peering's to write.
        """

        def status_for(newest: ReservationInstruction) -> ReservationInstructionStatus:
            status = newest.status
            if joined:
                status = replace(status, peered_cluster_ids=joints.with_peered(newest, joined))
            if parted:
                status = replace(status, peered_cluster_ids=joints.without_peered(newest, parted))
            if message and status.phase != FINISHED and self._target(newest) == wanted:
                status = replace(status, phase=phase or status.phase, message=message)
            return status

        return await editing.state(self._objects, found, status_for, self._clock)


def _peering_keys(found: ReservationInstruction, cluster: str) -> dict[str, str]:
    return {
        "namespace": found.metadata.namespace,
        "name": found.metadata.name,
        "reservation": found.spec.reservation_name,
        "cluster": cluster,
        "cpu": found.spec.requested_cpu,
        "memory": found.spec.requested_memory,
    }


def _unused(key: str) -> str:
    """The health key of a peering that is ready while its reservation is not activated."""
    return f"{key} is ready, but not activated"
