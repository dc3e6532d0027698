"""Joins this cluster with the providers of its reservations, and parts them when it is over.

A root task of the agent, level-triggered over ReservationInstructions. With whom it is joined is in the
object's status before anything is built, and a finalizer keeps the object until all of it is undone: so an
agent that is killed at any moment finishes its work when it is back. A provider that is dead, from which a
reservation has moved away, does not keep it from being joined with the next.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from datetime import timedelta
from typing import Final

from msgspec.structs import replace

from kubelend.agent import editing, joints
from kubelend.agent.crews import Crew
from kubelend.agent.joints import CONNECTING, FINALIZER, FINISHED, READY, Joint
from kubelend.agent.looking import follow
from kubelend.agent.ports import (
    BrokerCommunicator,
    Clock,
    Deleted,
    Listed,
    LocalObjects,
    Peering,
    Readiness,
)
from kubelend.agent.reservations import Reservations
from kubelend.agent.standing import Standing
from kubelend.core.errors import KubelendError
from kubelend.core.lifecycle import Phase
from kubelend.kits import tasks
from kubelend.wire.objects import ReservationInstruction, with_status

PART: Final = "peering"
POLL_FIRST, POLL_LONGEST = timedelta(milliseconds=500), timedelta(seconds=10)
CHECK_EVERY: Final = timedelta(minutes=1)
"""How often one that is ready is looked at again."""
MOST_TOLD: Final = 3
"""Troubles that are named, of all that there are."""


class PeeringKeeper:
    """Keeps the clusters joined that are to be, and activates what can be used."""

    def __init__(
        self,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: Reservations,
        peering: Peering,
        standing: Standing,
        clock: Clock,
        *,
        check_every: timedelta = CHECK_EVERY,
    ) -> None:
        self._objects = objects
        self._communicator = communicator
        self._reservations = reservations
        self._peering = peering
        self._standing = standing
        self._clock = clock
        self._check_every = check_every
        self._joining = Crew(self._look, self._not_joined)
        self._parting = Crew(self._part, self._not_parted)
        self._seen: dict[str, ReservationInstruction] = {}
        self._keys: dict[str, str] = {}
        """The key of each reservation's object."""
        self._joined: defaultdict[str, set[str]] = defaultdict(set)
        """Providers that were joined from here, by the object's UID: its status may lose a write."""
        self._leaving: dict[Joint, ReservationInstruction] = {}
        self._polls: dict[str, int] = {}
        self._troubles: dict[str, str] = {}
        self._unseen = ""
        reservations.listen(self._heard)

    async def run(self) -> None:
        """Join and part, for ever."""
        kind = ReservationInstruction
        watching = follow(self._objects, kind, self._take, self._see_again, random.random)
        await tasks.run_all(
            {"watching": watching, "joining": self._joining.run(), "parting": self._parting.run()}
        )

    # -- what makes it look

    def _take(self, event: ReservationInstruction | Deleted | Listed) -> None:
        match event:
            case Listed(objects):
                there = [one for one in objects if isinstance(one, ReservationInstruction)]
                for gone in self._seen.keys() - {one.key for one in there}:
                    self._miss(self._seen[gone])
                for one in there:
                    self._see(one)
            case Deleted(found):
                if isinstance(found, ReservationInstruction):
                    self._miss(found)
            case found:
                self._see(found)

    def _see(self, found: ReservationInstruction) -> None:
        known = self._seen.get(found.key)
        if known is not None and known.metadata.uid != found.metadata.uid:
            self._miss(known)
        self._seen[found.key] = found
        self._keys[found.spec.reservation_name] = found.key
        # What is written here is no reason to look again: it would make every pause a short one.
        if known is None or joints.cause(known) != joints.cause(found):
            self._joining.add(found.key)

    def _miss(self, gone: ReservationInstruction) -> None:
        """Usually our finalizer has gone before it. If not, it may have left something behind."""
        self._seen.pop(gone.key, None)
        self._keys.pop(gone.spec.reservation_name, None)
        self._leave_all(gone)
        self._joining.add(gone.key)

    def _heard(self, reservation: str) -> None:
        key = self._keys.get(reservation)
        if key is not None:
            self._joining.add(key)

    def _see_again(self, problem: str) -> None:
        self._unseen = problem
        self._report()

    # -- joining

    async def _look(self, key: str) -> None:
        found = await self._objects.find(ReservationInstruction, key)
        if found is None:
            self._well(key)
            self._joining.discharge(key)
            return
        wanted = self._target(found)
        parting = self._leave_all(found, but=wanted)
        if wanted and Joint(key, found.metadata.uid, wanted) not in self._leaving:
            await self._join(found, wanted)
        elif not wanted:
            self._well(key)
            if not parting:
                await self._let_go(found)

    async def _join(self, found: ReservationInstruction, wanted: str) -> None:
        """Build what is missing, and say how far it is."""
        peer = joints.peer(found, wanted)
        if await self._begin(found, wanted):
            await self._peering.connect(peer)
            await self._peering.size(peer)
            await self._finish(found, wanted, await self._peering.ready(peer))

    async def _begin(self, found: ReservationInstruction, wanted: str) -> bool:
        """Write down that it is going to be joined; False if that is out of date."""
        marked = await editing.edit(self._objects, found, joints.with_finalizer)
        if marked is None:
            return False
        found = marked
        if wanted not in found.status.peered_cluster_ids:
            changed = await self._set(
                found, wanted, phase=CONNECTING, message=f"joining with {wanted}", joined=wanted
            )
            if changed is None or self._target(changed) != wanted:
                return False
        self._joined[found.metadata.uid].add(wanted)
        return True

    async def _finish(
        self, found: ReservationInstruction, wanted: str, readiness: Readiness
    ) -> None:
        phase = READY if readiness.is_ready else CONNECTING
        changed = await self._set(found, wanted, phase=phase, message=readiness.reason)
        if changed is None or self._target(changed) != wanted:
            return
        self._well(found.key)
        if not readiness.is_ready:
            self._joining.succeeded(found.key)
            self._poll_later(found.key)
        elif await self._activate(found):
            self._joining.succeeded(found.key)
            self._joining.add_after(found.key, self._check_every)
        else:
            self._joining.retry(found.key)

    def _poll_later(self, key: str) -> None:
        polls = self._polls.get(key, 0)
        self._polls[key] = polls + 1
        self._joining.add_after(key, min(POLL_FIRST * 2 ** min(polls, 10), POLL_LONGEST))

    async def _activate(self, found: ReservationInstruction) -> bool:
        """Have the broker know that it is used; False if that has to be tried again.

        By its own newest word one sees whether it knows.
        """
        name = found.spec.reservation_name
        self._polls.pop(found.key, None)
        known = self._reservations.find(name)
        what = f"{found.key} is ready but not activated"
        if known is not None and known.status.phase == Phase.RESERVED.value:
            try:
                self._reservations.put(await self._communicator.activate(name))
            except KubelendError as error:
                self._trouble(what, str(error))
                return False
        self._well(what)
        return True

    async def _not_joined(self, key: str, error: KubelendError) -> None:
        self._trouble(key, str(error))
        found = self._seen.get(key)
        if found is not None and (wanted := self._target(found)):
            with contextlib.suppress(KubelendError):
                await self._set(found, wanted, phase=CONNECTING, message=str(error))

    # -- parting

    def _leave_all(self, found: ReservationInstruction, but: str = "") -> bool:
        """Part from all it was joined with but one; False if there is nobody to part from."""
        uid = found.metadata.uid
        clusters = {*self._joined.get(uid, ()), *found.status.peered_cluster_ids} - {but}
        for joint in (Joint(found.key, uid, cluster) for cluster in sorted(clusters)):
            if joint not in self._leaving:
                self._leaving[joint] = found
                self._parting.add(joint)
        return bool(clusters)

    async def _part(self, joint: Joint) -> None:
        found = self._leaving[joint]
        await self._peering.disconnect(joints.parted(found, joint.cluster))
        await self._set(found, "", parted=joint.cluster)
        self._joined[joint.uid].discard(joint.cluster)
        if not self._joined[joint.uid]:
            del self._joined[joint.uid]
        del self._leaving[joint]
        self._parting.discharge(joint)
        self._well(str(joint))
        self._joining.add(joint.key)

    async def _not_parted(self, joint: Joint, error: KubelendError) -> None:
        self._trouble(str(joint), str(error))
        with contextlib.suppress(KubelendError):
            await self._set(self._leaving[joint], "", message=str(error))

    async def _let_go(self, found: ReservationInstruction) -> None:
        """Nothing is left of it: the object may go, or wait for another provider."""
        if FINALIZER not in found.metadata.finalizers:
            return
        changed = await self._set(found, "", phase=CONNECTING, message="it has no provider now")
        if changed is not None:
            await editing.edit(self._objects, changed, joints.without_finalizer)

    # -- telling

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
        """Change our part of the newest status; None if the object is gone.

        Words for another provider than the one that is wanted now are out of date, and those about the
        end are not ours to say.
        """
        newest = await self._objects.find(ReservationInstruction, found.key)
        if newest is None or newest.metadata.uid != found.metadata.uid:
            return None
        status = newest.status
        if joined:
            status = replace(status, peered_cluster_ids=joints.with_peered(newest, joined))
        if parted:
            status = replace(status, peered_cluster_ids=joints.without_peered(newest, parted))
        if message and status.phase != FINISHED and self._target(newest) == wanted:
            status = replace(status, phase=phase or status.phase, message=message)
        if status == newest.status:
            return newest
        return await self._objects.set_status(with_status(newest, status, self._clock()))

    def _trouble(self, what: str, problem: str) -> None:
        # The first words stand until it is well: others come at every try, and say no more.
        self._troubles.setdefault(what, problem)
        self._report()

    def _well(self, what: str) -> None:
        self._troubles.pop(what, None)
        self._report()

    def _report(self) -> None:
        told = [f"{what}: {problem}" for what, problem in sorted(self._troubles.items())]
        more = [f"and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else []
        self._standing.report(
            PART,
            "; ".join(filter(None, [self._unseen, *told[:MOST_TOLD], *more])),
            is_partial=not self._unseen,
        )
