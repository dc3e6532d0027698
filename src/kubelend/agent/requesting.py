"""The requester: turns the ResourceRequests of the own cluster into reservations, and keeps them so.

A root task of the agent, level-triggered: whatever happened, one look at an object compares what is written
at it with what the broker last said, and does what is missing. What is asked is written down before it is
asked (see `agent.wishes`), so a look may be broken off anywhere, and simply be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from kubelend.agent import editing, verdicts, wishes
from kubelend.agent.borrowing import Borrower
from kubelend.agent.instructing import Instructor, Outside
from kubelend.agent.leases import Leases
from kubelend.agent.looking import Looks, follow
from kubelend.agent.ports import BrokerCommunicator, Clock, LocalObjects
from kubelend.agent.reservations import LIVE, Reservations
from kubelend.agent.sightings import Sightings
from kubelend.agent.standing import Standing
from kubelend.agent.wishes import Stage
from kubelend.core.errors import InvalidInput, KubelendError, NotFound, WrongPhase
from kubelend.core.lifecycle import Phase
from kubelend.kits import tasks
from kubelend.wire import bodies
from kubelend.wire.objects import (
    Asked,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestStatus,
)

PART: Final = "requester"
FINISHED_FOR: Final = timedelta(hours=1)


class Requester:
    """Use `run` as a root task."""

    def __init__(  # noqa: PLR0913 - all that it works with, and nothing behind its back
        self,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: Reservations,
        standing: Standing,
        clock: Clock,
        *,
        cluster_id: str,
        namespace: str = "",
        finished_for: timedelta = FINISHED_FOR,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`namespace` is that of the ReservationInstructions; empty: that of each request.

        `finished_for` is how long they stay when their reservation is over.
        """
        self._objects = objects
        self._reservations = reservations
        self._standing = standing
        self._clock = clock
        self._namespace = namespace
        self._chance = chance
        self._looks = Looks("request", self._look, chance)
        self._sightings = Sightings(self._looks.add)
        self._leases = Leases(clock, chance)
        self._borrower = Borrower(communicator, reservations, self._leases, cluster_id)
        self._instructor = Instructor(
            Outside(objects, communicator, reservations, clock),
            self._leases,
            self._place,
            cluster_id=cluster_id,
            finished_for=finished_for,
            chance=chance,
        )
        self._asking: set[str] = set()
        """The requests for which the broker may be making a reservation at this moment."""
        self._troubles: dict[str, KubelendError] = {}
        """What keeps reservations from being renewed."""
        self._unseen: dict[str, str] = {}
        """Why a kind of object cannot be watched."""
        reservations.listen(self._heard)
        reservations.on_contact(self._hurry)

    async def run(self) -> None:
        """Borrow what is wished for, for ever."""
        for known in self._reservations.open():
            self._instructor.add(known.id)
        await tasks.run_all(
            {
                "requests": self._follow_requests(),
                "instructions": self._follow_instructions(),
                "requesting": self._looks.run(),
                "instructing": self._instructor.looks.run(),
            }
        )

    # -- what makes it look

    async def _follow_requests(self) -> None:
        kind, take = ResourceRequest, self._sightings.take
        await follow(self._objects, kind, take, self._reporter(kind.plural), self._chance)

    async def _follow_instructions(self) -> None:
        kind, take = ReservationInstruction, self._instructor.take
        await follow(self._objects, kind, take, self._reporter(kind.plural), self._chance)

    def _reporter(self, plural: str) -> Callable[[str], None]:
        def report(problem: str) -> None:
            self._unseen[plural] = problem
            self._standing.report(PART, "; ".join(filter(None, self._unseen.values())))

        return report

    def _heard(self, reservation: str) -> None:
        self._instructor.add(reservation)
        owner = self._sightings.owner(reservation)
        if owner:
            self._looks.add(owner)

    def _hurry(self) -> None:
        """The broker is back: nobody waits longer for it than it was away."""
        self._looks.hurry()
        self._instructor.looks.hurry()

    def _place(self, reservation: str) -> str | None:
        """Where its instruction belongs; see `instructing.Place`."""
        owner = self._sightings.owner(reservation)
        is_settled = self._sightings.is_complete and not self._asking
        wanted = self._namespace or owner.partition("/")[0]
        return wanted if wanted or is_settled else None

    # -- the look

    async def _look(self, key: str) -> None:
        for gone in self._sightings.lost(key):
            await self._withdraw(gone)
            self._sightings.bury(gone)
        found = await self._objects.find(ResourceRequest, key)
        if found is None:
            return
        if found.metadata.deletion_timestamp is not None:
            await self._part(found)
        else:
            await self._serve(found)

    async def _serve(self, found: ResourceRequest) -> None:
        stage, asked = wishes.stage(found), found.status.asked
        if stage is Stage.NEW:
            await self._begin(found)
        elif stage is Stage.BOUND:
            await self._keep(found)
        elif stage is Stage.ASKING and wishes.is_changed(found):
            await self._start_over(found)
        elif stage is Stage.ASKING and asked is not None:
            await self._ask(found, asked)

    # -- asking

    async def _begin(self, found: ResourceRequest) -> None:
        """Write down what is to be asked, and ask it."""
        try:
            wishes.request(found.spec)
        except InvalidInput as error:
            await self._say(found, verdicts.of_unreadable(found, error))
            return
        if not wishes.has_finalizer(found):
            marked = await editing.add_finalizer(self._objects, found, wishes.FINALIZER)
            if marked is None or not wishes.has_finalizer(marked):
                return  # somebody wants it gone since
            found = marked
        asked = Asked(found.metadata.generation, wishes.request(found.spec))
        written = await self._say(found, verdicts.of_question(asked))
        if written is not None:
            await self._ask(written, asked, is_first=True)

    async def _ask(self, found: ResourceRequest, asked: Asked, *, is_first: bool = False) -> None:
        with self._deciding(found):
            try:
                body = await self._borrower.ask(found, asked, is_first=is_first)
            except KubelendError as error:
                await self._not_reserved(found, asked, error)
                return
            # Before anybody hears of it: it is to be known whose it is.
            self._sightings.own(body.id, found.key)
            body = self._borrower.learn(body)
            await self._say(found, verdicts.of_reservation(found, body))
        # The stream may have been quicker, when nobody here knew that yet.
        self._heard(body.id)

    async def _not_reserved(
        self, found: ResourceRequest, asked: Asked, error: KubelendError
    ) -> None:
        if verdicts.is_passing(error):
            await self._say(found, verdicts.of_fault(asked, error))
            raise error
        await self._say(found, verdicts.of_refusal(asked, error))

    async def _start_over(self, found: ResourceRequest) -> None:
        """It asks for something else now, and has got nothing yet that one could lose."""
        await self._withdraw(found)
        await self._say(found, verdicts.of_change(found))
        self._looks.add(found.key)

    # -- keeping

    async def _keep(self, found: ResourceRequest) -> None:
        name = found.status.reservation_name
        body = self._reservations.find(name) or await self._borrower.find(name)
        if body is not None:
            body = await self._renewed(found, body)
        if body is None:
            await self._say(found, verdicts.of_loss(found))
        elif body.status.phase == Phase.PENDING and wishes.is_changed(found):
            await self._start_over(found)
        else:
            await self._tell(found, body)

    async def _tell(self, found: ResourceRequest, body: bodies.Reservation) -> None:
        trouble = self._troubles.get(body.id) if found.spec.renew else None
        written = await self._say(found, verdicts.of_reservation(found, body, trouble))
        if trouble is not None and body.status.phase in LIVE:
            raise trouble
        self._troubles.pop(body.id, None)
        if written is not None and wishes.stage(written) is Stage.NEW:
            self._looks.add(found.key)  # it is over, and the spec has changed before

    async def _renewed(
        self, found: ResourceRequest, body: bodies.Reservation
    ) -> bodies.Reservation | None:
        """As it is afterwards: renewed if it is time to, and with the next time set."""
        if not found.spec.renew or body.status.phase not in LIVE:
            return body
        self._leases.hear(body)
        # Asked once: its time may come between two looks at the clock, and be missed by both.
        left = self._leases.until_renewal(body.id)
        renewed: bodies.Reservation | None = body
        if left == timedelta():
            renewed = await self._renew(body)
            left = self._leases.until_renewal(body.id)
        if left:
            self._looks.add_after(found.key, left)
        return renewed

    async def _renew(self, body: bodies.Reservation) -> bodies.Reservation | None:
        try:
            renewed = await self._borrower.renew(body.id)
        except KubelendError as error:
            self._troubles[body.id] = error
            is_over = isinstance(error, NotFound | WrongPhase)
            return await self._borrower.find(body.id) if is_over else body
        self._troubles.pop(body.id, None)
        return renewed

    # -- giving back

    async def _part(self, found: ResourceRequest) -> None:
        """Somebody wants it gone: it goes when nothing is held for it any more."""
        if not wishes.has_finalizer(found):
            return
        try:
            await self._withdraw(found)
        except KubelendError as error:
            await self._say(found, verdicts.of_parting(found, error))
            raise
        newest = await self._objects.find(ResourceRequest, found.key)
        if newest is not None and newest.metadata.uid == found.metadata.uid:
            self._sightings.free(newest)
            await editing.remove_finalizer(self._objects, newest, wishes.FINALIZER)

    async def _withdraw(self, found: ResourceRequest) -> None:
        with self._deciding(found):
            await self._borrower.withdraw(found)
        self._sightings.disown(found.status.reservation_name)

    # -- small things

    async def _say(
        self, found: ResourceRequest, status: ResourceRequestStatus
    ) -> ResourceRequest | None:
        """Write the status, if it says something new. None if the object is gone.

        Nobody else writes it. Where a user has changed the spec since, another look follows anyway.
        """
        return await editing.state(self._objects, found, lambda _: status, self._clock)

    @contextmanager
    def _deciding(self, found: ResourceRequest) -> Iterator[None]:
        self._asking.add(found.key)
        try:
            yield
        finally:
            self._asking.discard(found.key)
