"""The provider: sets aside what the broker has promised for this cluster, or refuses; and lets go of it.

A root task of the agent, level-triggered by the reservation's ID: whatever happened, one look compares what
the broker last said with the ProviderInstruction that is there, and does what is missing. Only the broker's
word ends a promise: a clock that is wrong, or a broker that is away, gives nothing away.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
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
HEARD_SOON: Final = timedelta(seconds=2)
"""After the start the broker's list tells of all at once; only then each is worth a question."""
ASK_AGAIN: Final = timedelta(minutes=1)
"""Of what is over by this clock, but not by the broker's."""
LATE: Final = timedelta(seconds=1)
"""The broker is given so long to say by itself that something is over."""
READ_AGAIN: Final = timedelta(seconds=2)
"""If the own cluster's objects cannot be read."""
LONGEST_REASON: Final = 1024
"""Characters, by the contract of the call."""

log = structlog.get_logger("kubelend.agent")


class Lender(msgspec.Struct, frozen=True):
    """Who lends, and where that is written down."""

    cluster_id: str
    namespace: str = "default"
    finished_for: timedelta = timedelta(minutes=10)
    """How long the object of a promise that is over stays, for people to look at."""


class Provider:
    """Use `run` as a root task. Await `restore` before the first advertisement is made."""

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
        self._looks = Looks("provider", self._look)
        self._restored = False
        self._asks_from = 0.0
        """By the loop's time."""
        reservations.listen(self._heard)
        reservations.on_contact(self._looks.hurry)

    async def restore(self) -> None:
        """Promise again what was set aside when the agent stopped. Waits until that can be read."""
        while not self._restored:
            try:
                self._take_up(await self._filing.all())
                self._restored = True
            except KubelendError as error:
                self._report(f"cannot read what was promised: {error}")
                await asyncio.sleep(READ_AGAIN.total_seconds())
        self._report("")

    async def run(self) -> None:
        """Keep promises, for ever."""
        await self.restore()
        loop = asyncio.get_running_loop()
        self._asks_from = loop.time() + HEARD_SOON.total_seconds()
        watching = looking.follow(
            self._objects, ProviderInstruction, self._saw, self._report, random.random
        )
        await tasks.run_all({"watching": watching, "providing": self._looks.run()})

    def _take_up(self, kept: Iterable[tuple[str, ProviderInstruction]]) -> None:
        for reservation, each in kept:
            if each.status.enforced or each.status.phase == provisions.HELD:
                # One that somebody has spoilt waits for the broker's word.
                with contextlib.suppress(InvalidInput):
                    self._promises.make(reservation, provisions.hold_in(each))

    # -- what makes it look

    def _heard(self, reservation: str) -> None:
        found = self._reservations.find(reservation)
        if reservation in self._promises or (found is not None and self._is_concerned(found)):
            self._looks.add(reservation)

    def _saw(self, change: ProviderInstruction | Deleted | Listed) -> None:
        names = self._filing.named(change)
        # In a list those miss that somebody deleted while nobody watched.
        for reservation in [*names, *self._promises] if isinstance(change, Listed) else names:
            self._looks.add(reservation)

    def _report(self, problem: str) -> None:
        self._standing.report(PART, problem)

    # -- the look

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
        """Write down what is promised, and only then tell the broker: what it was told is known here."""
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
        log.info("refused", reservation=found.id, requester=found.requester_id, reason=refusal)
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
            log.info("withdrawn", reservation=reservation, reason=why)
            await self._finish(kept, provisions.WITHDRAWN, why)
        elif kept is not None:
            await self._clean_up(reservation, kept.status.finished_at)
        elif found is not None and found.status.phase not in OPEN:
            await self._clean_up(reservation, found.status.finished_at)
        if found is not None and self._is_elsewhere(found):
            # Its later life comes by as well, and is forgotten as soon as it was looked at.
            self._reservations.forget(reservation)

    # -- its parts

    async def _newest(self, reservation: str) -> bodies.Reservation | None:
        return await asking.newest(self._communicator, self._reservations, reservation)

    async def _acknowledge(self, found: bodies.Reservation) -> bool:
        try:
            self._reservations.put(await self._communicator.acknowledge(found.id))
        except (Conflict, NotFound):
            await self._doubt(found)
            return False
        log.info("holding", reservation=found.id, requester=found.requester_id)
        return True

    async def _doubt(self, found: bodies.Reservation) -> None:
        """The broker thinks otherwise, so what was known is old: whatever it says makes a new look."""
        if await self._newest(found.id) == found:
            raise Conflict(f"the broker does not let {found.id} be answered")

    async def _finish(self, kept: ProviderInstruction, phase: str, why: str) -> None:
        """That it has another status makes a new look, which sees to its end."""
        await self._filing.say(kept, provisions.finished(phase, why, self._clock()))

    async def _clean_up(self, reservation: str, ended: datetime | None) -> None:
        """Once nobody wants to look at it any longer, let there be nothing of it, here or in memory."""
        now = self._clock()
        left = timedelta() if ended is None else ended + self._lender.finished_for - now
        if left > timedelta():
            self._looks.add_after(reservation, left)
        else:
            await self._filing.remove(reservation)
            self._reservations.forget(reservation)

    # -- questions

    def _is_concerned(self, found: bodies.Reservation) -> bool:
        return self._lender.cluster_id in (found.target_cluster_id, *found.previous_cluster_ids)

    def _is_ours(self, found: bodies.Reservation) -> bool:
        return found.status.phase in LIVE and found.target_cluster_id == self._lender.cluster_id

    def _is_elsewhere(self, found: bodies.Reservation) -> bool:
        """Whether this cluster has no part in it any more."""
        return self._lender.cluster_id not in (found.target_cluster_id, found.requester_id)

    def _is_owed(self, reservation: str, kept: ProviderInstruction | None) -> bool:
        """Whether somebody may count on it, of which the broker has said nothing yet."""
        return reservation in self._promises or (
            kept is not None and not provisions.is_finished(kept)
        )

    def _is_overdue(self, found: bodies.Reservation) -> bool:
        """By this clock, which may be wrong."""
        expires_at = found.status.expires_at
        return self._is_ours(found) and expires_at is not None and expires_at <= self._clock()

    def _is_undecided(self, found: bodies.Reservation) -> bool:
        """What is acknowledged or in use cannot be refused any more: it is held, whatever is free.

        Nor what was promised here: that an acknowledgement failed does not mean that it was not heard.
        """
        return (
            found.status.phase == Phase.RESERVED
            and found.status.acknowledged_at is None
            and found.id not in self._promises
        )
