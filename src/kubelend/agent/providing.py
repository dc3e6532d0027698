"""The provider: holds the resources of reservations placed on this cluster, or refuses them, and
withdraws holds.

A root task of the agent, level-triggered by reservation ID: each reconcile compares the latest state of
the reservation with its ProviderInstruction and does what is missing. Only the broker ends a hold:
neither a wrong clock nor an unreachable broker frees resources.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

import msgspec
import structlog

from kubelend.agent import asking, looking, provisions
from kubelend.agent.filing import Filing
from kubelend.agent.looking import Looks
from kubelend.agent.ports import BrokerCommunicator, Clock, Deleted, Listed, LocalObjects
from kubelend.agent.promises import Promises
from kubelend.agent.reservations import LIVE, OPEN, Reservations
from kubelend.agent.standing import Standing
from kubelend.core.errors import Conflict, InvalidInput, KubelendError, NotFound
from kubelend.core.lifecycle import Phase
from kubelend.kits import tasks
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction

PART: Final = "provider"
MEASURED_SOON: Final = timedelta(milliseconds=100)
"""How long to wait for the first measurement before a reservation is decided."""
HEARD_SOON: Final = timedelta(seconds=2)
"""After the start the broker's list covers all reservations; only those it lacks are fetched one by
one."""
ASK_AGAIN: Final = timedelta(minutes=1)
"""How often a reservation is fetched that has expired by the local clock but not on the broker."""
LATE: Final = timedelta(seconds=1)
"""How long to wait for the broker to report an expiry before fetching the reservation."""
READ_AGAIN: Final = timedelta(seconds=2)
"""Pause between attempts to read the cluster's objects at start-up."""
LONGEST_REASON: Final = 1024
"""In characters; limited by the REST API."""

log = structlog.get_logger("kubelend.agent")


class Lender(msgspec.Struct, frozen=True):
    """The provider's identity, and where it writes ProviderInstructions."""

    cluster_id: str
    namespace: str = "default"
    finished_for: timedelta = timedelta(minutes=10)
    """How long the object of a finished hold is kept for people to read."""


class Provider:
    """Use `run` as a root task. Await `restore` before the first advertisement."""

    def __init__(
        self,
        lender: Lender,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: Reservations,
        promises: Promises,
        standing: Standing,
        clock: Clock,
    ) -> None:
        self._lender = lender
        self._objects = objects
        self._standing = standing
        self._filing = Filing(objects, lender.namespace, clock)
        self._communicator = communicator
        self._reservations = reservations
        self._promises = promises
        self._clock = clock
        self._looks = Looks("ProviderInstruction", self._look)
        self._restored = False
        self._asks_from = 0.0
        """In the event loop's time."""
        reservations.listen(self._heard)
        reservations.on_contact(self._looks.hurry)

    async def restore(self) -> None:
        """Restore the holds from the ProviderInstructions. Retries until they can be read."""
        while not self._restored:
            try:
                self._take_up(await self._filing.all())
                self._restored = True
            except KubelendError as error:
                self._report(f"cannot read ProviderInstructions: {error}")
                await asyncio.sleep(READ_AGAIN.total_seconds())
        self._report("")

    async def run(self) -> None:
        """Reconcile holds. Runs until cancelled."""
        await self.restore()
        loop = asyncio.get_running_loop()
        self._asks_from = loop.time() + HEARD_SOON.total_seconds()
        watching = looking.follow(
            self._objects, ProviderInstruction, self._saw, self._report, random.random
        )
        await tasks.run_all({"watch": watching, "reconcile": self._looks.run()})

    def _take_up(self, kept: Iterable[tuple[str, ProviderInstruction]]) -> None:
        for reservation, each in kept:
            if each.status.enforced or each.status.phase == provisions.HELD:
                # An invalid spec is rewritten from the broker's state.
                with contextlib.suppress(InvalidInput):
                    self._promises.make(reservation, provisions.hold_in(each))

    # -- triggers

    def _heard(self, reservation: str) -> None:
        found = self._reservations.find(reservation)
        if reservation in self._promises or (found is not None and self._is_concerned(found)):
            self._looks.add(reservation)

    def _saw(self, change: ProviderInstruction | Deleted | Listed) -> None:
        names = self._filing.named(change)
        # A list lacks the objects that were deleted while the watch was down.
        for reservation in [*names, *self._promises] if isinstance(change, Listed) else names:
            self._looks.add(reservation)

    def _report(self, problem: str) -> None:
        self._standing.report(PART, problem)

    # -- reconcile

    async def _look(self, reservation: str) -> None:
        kept = await self._filing.find(reservation)
        found = self._reservations.find(reservation)
        if found is None and self._is_owed(reservation, kept):
            early = self._asks_from - asyncio.get_running_loop().time()
            if early > 0:
                self._looks.add_after(reservation, timedelta(seconds=early))
                return
            found = await self._newest(reservation)
        elif found is not None and self._is_overdue(found):
            found = await self._newest(reservation)
        if found is not None and self._is_ours(found):
            await self._keep(found, kept)
        else:
            await self._let_go(reservation, found, kept)

    async def _keep(self, found: bodies.Reservation, kept: ProviderInstruction | None) -> None:
        if not self._is_undecided(found):
            self._promises.make(found.id, provisions.hold_of(found))
            await self._hold(found, kept)
        elif not self._promises.may_be_made:
            self._looks.add_after(found.id, MEASURED_SOON)
        elif refusal := self._promises.consider(found, self._clock()):
            await self._refuse(found, kept, refusal[:LONGEST_REASON])
        else:
            await self._hold(found, kept)

    async def _hold(self, found: bodies.Reservation, kept: ProviderInstruction | None) -> None:
        """Write the object first and acknowledge second: after a crash every acknowledged hold is
        known here.
        """
        kept = await self._filing.write(found, kept)
        if found.status.acknowledged_at is None and not await self._acknowledge(found):
            return
        await self._filing.say(kept, provisions.held(is_enforced=self._promises.are_enforced))
        if found.status.expires_at is not None:
            left = found.status.expires_at - self._clock()
            self._looks.add_after(found.id, left + LATE if left > timedelta() else ASK_AGAIN)

    async def _refuse(
        self, found: bodies.Reservation, kept: ProviderInstruction | None, refusal: str
    ) -> None:
        try:
            self._reservations.put(await self._communicator.refuse(found.id, refusal))
        except (Conflict, NotFound):
            await self._doubt(found)
            return
        log.info("Reservation refused", **_log_keys(found), reason=refusal)
        await self._finish(await self._filing.write(found, kept), provisions.REFUSED, refusal)

    async def _let_go(
        self,
        reservation: str,
        found: bodies.Reservation | None,
        kept: ProviderInstruction | None,
    ) -> None:
        self._promises.drop(reservation)
        if kept is not None and not provisions.is_finished(kept):
            why = provisions.farewell(found, self._lender.cluster_id)
            log.info("Reservation withdrawn", **_instruction_log_keys(kept), reason=why)
            await self._finish(kept, provisions.WITHDRAWN, why)
        elif kept is not None:
            await self._clean_up(reservation, kept.status.finished_at)
        elif found is not None and found.status.phase not in OPEN:
            await self._clean_up(reservation, found.status.finished_at)
        if found is not None and self._is_elsewhere(found):
            # Later updates still arrive; each is dropped again after its reconcile.
            self._reservations.forget(reservation)

    # -- steps

    async def _newest(self, reservation: str) -> bodies.Reservation | None:
        return await asking.newest(self._communicator, self._reservations, reservation)

    async def _acknowledge(self, found: bodies.Reservation) -> bool:
        try:
            self._reservations.put(await self._communicator.acknowledge(found.id))
        except (Conflict, NotFound):
            await self._doubt(found)
            return False
        log.info("Reservation held", **_log_keys(found))
        return True

    async def _doubt(self, found: bodies.Reservation) -> None:
        """The broker rejected the call, so the known state is outdated: a newer one triggers another
        reconcile.
        """
        if await self._newest(found.id) == found:
            raise Conflict(
                f"{found.id}: the broker accepts neither an acknowledgement nor a refusal"
            )

    async def _finish(self, kept: ProviderInstruction, phase: str, why: str) -> None:
        """The status change triggers another reconcile, which deletes the object when its time has
        come.
        """
        await self._filing.say(kept, provisions.finished(phase, why, self._clock()))

    async def _clean_up(self, reservation: str, ended: datetime | None) -> None:
        """Delete the object and the cached reservation once the retention is over."""
        now = self._clock()
        left = timedelta() if ended is None else ended + self._lender.finished_for - now
        if left > timedelta():
            self._looks.add_after(reservation, left)
        else:
            await self._filing.remove(reservation)
            self._reservations.forget(reservation)

    # -- conditions

    def _is_concerned(self, found: bodies.Reservation) -> bool:
        return self._lender.cluster_id in (found.target_cluster_id, *found.previous_cluster_ids)

    def _is_ours(self, found: bodies.Reservation) -> bool:
        return found.status.phase in LIVE and found.target_cluster_id == self._lender.cluster_id

    def _is_elsewhere(self, found: bodies.Reservation) -> bool:
        """Whether this cluster is neither the provider nor the requester."""
        return self._lender.cluster_id not in (found.target_cluster_id, found.requester_id)

    def _is_owed(self, reservation: str, kept: ProviderInstruction | None) -> bool:
        """Whether a requester may rely on a hold of which the broker has not reported the state yet."""
        return reservation in self._promises or (
            kept is not None and not provisions.is_finished(kept)
        )

    def _is_overdue(self, found: bodies.Reservation) -> bool:
        """Whether it has expired by the local clock, which may be wrong."""
        expires_at = found.status.expires_at
        return self._is_ours(found) and expires_at is not None and expires_at <= self._clock()

    def _is_undecided(self, found: bodies.Reservation) -> bool:
        """Acknowledged and active reservations cannot be refused: they are held whatever is free.

        The same applies to recorded holds: a failed acknowledgement may have reached the broker.
        """
        return (
            found.status.phase == Phase.RESERVED
            and found.status.acknowledged_at is None
            and found.id not in self._promises
        )


def _log_keys(found: bodies.Reservation) -> dict[str, str]:
    """The reservation, its requester, its resources and its expiry."""
    amounts = provisions.hold_of(found).resources.texts()
    return _keys(found.id, found.requester_id, amounts, found.status.expires_at)


def _instruction_log_keys(kept: ProviderInstruction) -> dict[str, str]:
    spec = kept.spec
    amounts = {"cpu": spec.requested_cpu, "memory": spec.requested_memory}
    reservation = provisions.reservation_of(kept)
    return _keys(reservation, spec.requester_cluster_id, amounts, spec.expires_at)


def _keys(
    reservation: str, requester: str, amounts: Mapping[str, str], expires_at: datetime | None
) -> dict[str, str]:
    return {
        "reservation": reservation,
        "requester": requester,
        "cpu": amounts.get("cpu", "0"),
        "memory": amounts.get("memory", "0"),
        "expires_at": "" if expires_at is None else expires_at.isoformat(),
    }
