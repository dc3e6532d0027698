"""The requester: reconciles the ResourceRequests of the cluster into reservations, and renews and
releases them.

A root task of the agent, level-triggered: each reconcile compares an object with the latest state of
its reservation and does what is missing. The request is written to the status before it is sent (see
`agent.resource_requests`), so a reconcile can be interrupted anywhere and repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final

import structlog

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

log = structlog.get_logger("kubelend.agent")


class Requester:
    """Use `run` as a root task."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
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
        """`namespace` is that of the ReservationInstructions; empty for the namespace of each request.

        `finished_ttl` is how long they are kept after their reservation has finished.
        """
        self._objects = objects
        self._reservations = reservations
        self._standing = standing
        self._clock = clock
        self._namespace = namespace
        self._chance = chance
        self._looks = Looks("ResourceRequest", self._look, chance)
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
        """Requests for which the broker may be making a reservation at this moment."""
        self._troubles: dict[str, KubelendError] = {}
        """The last renewal error of each reservation."""
        self._unseen: dict[str, str] = {}
        """The watch error of each kind."""
        reservations.listen(self._heard)
        reservations.on_contact(self._hurry)

    async def run(self) -> None:
        """Reconcile requests and instructions. Runs until cancelled."""
        for known in self._reservations.open():
            self._instructor.add(known.id)
        await tasks.run_all(
            {
                "watch requests": self._follow_requests(),
                "watch instructions": self._follow_instructions(),
                "reconcile requests": self._looks.run(),
                "reconcile instructions": self._instructor.looks.run(),
            }
        )

    # -- triggers

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
        """The broker is reachable again: retry failed work without waiting for its backoff."""
        self._looks.hurry()
        self._instructor.looks.hurry()

    def _place(self, reservation: str) -> str | None:
        """The namespace of a reservation's instruction; see `NamespaceLookup`."""
        owner = self._sightings.owner(reservation)
        is_settled = self._sightings.is_complete and not self._asking
        wanted = self._namespace or owner.partition("/")[0]
        return wanted if wanted or is_settled else None

    # -- reconcile

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

    # -- requesting

    async def _begin(self, found: ResourceRequest) -> None:
        """Write the request to the status, then send it."""
        try:
            wishes.request(found.spec)
        except InvalidInput as error:
            await self._say(found, verdicts.of_unreadable(found, error))
            return
        if not wishes.has_finalizer(found):
            marked = await editing.add_finalizer(self._objects, found, wishes.FINALIZER)
            if marked is None or not wishes.has_finalizer(marked):
                return  # deleted in the meantime
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
            # Bind it before subscribers are notified, so that they find its owner.
            self._sightings.own(body.id, found.key)
            body = self._borrower.learn(body)
            await self._say(found, verdicts.of_reservation(found, body))
        # The stream may have delivered it before it was bound.
        self._heard(body.id)

    async def _not_reserved(
        self, found: ResourceRequest, asked: Asked, error: KubelendError
    ) -> None:
        if verdicts.is_passing(error):
            await self._say(found, verdicts.of_fault(asked, error))
            raise error
        await self._say(found, verdicts.of_refusal(asked, error))

    async def _start_over(self, found: ResourceRequest) -> None:
        """The spec has changed before a reservation was made: start again."""
        await self._withdraw(found)
        await self._say(found, verdicts.of_change(found))
        self._looks.add(found.key)

    # -- bound

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
            self._looks.add(found.key)  # finished, and the spec has changed since the request

    async def _renewed(
        self, found: ResourceRequest, body: bodies.Reservation
    ) -> bodies.Reservation | None:
        """Renew if it is due, and schedule the next renewal. Returns the state afterwards."""
        if not found.spec.renew or body.status.phase not in LIVE:
            return body
        self._leases.hear(body)
        # Read once: it may become due between two reads of the clock.
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
        expires_at = _time_text(renewed.status.expires_at)
        log.info("Reservation renewed", reservation=body.id, expires_at=expires_at)
        return renewed

    # -- releasing

    async def _part(self, found: ResourceRequest) -> None:
        """The object is being deleted: release its reservation, then remove the finalizer."""
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
            released = await self._borrower.withdraw(found)
        if released:
            log.info("ResourceRequest released", **_object_keys(found), reservation=released)
        self._sightings.disown(found.status.reservation_name)

    # -- helpers

    async def _say(
        self, found: ResourceRequest, status: ResourceRequestStatus
    ) -> ResourceRequest | None:
        """Write the status if it changes, and log the step. None if the object is gone.

        Nobody else writes it. If a user has changed the spec since, another reconcile follows anyway.
        """
        before = found.status

        def change(newest: ResourceRequest) -> ResourceRequestStatus:
            nonlocal before
            before = newest.status
            return status

        written = await editing.state(self._objects, found, change, self._clock)
        if written is not None:
            _log_step(written, before)
        return written

    @contextmanager
    def _deciding(self, found: ResourceRequest) -> Iterator[None]:
        self._asking.add(found.key)
        try:
            yield
        finally:
            self._asking.discard(found.key)


_STEPS: Final = {
    "Reserved": "ResourceRequest reserved",
    "Active": "ResourceRequest active",
    "Released": "ResourceRequest released",
    "Expired": "ResourceRequest expired",
}


def _log_step(written: ResourceRequest, before: ResourceRequestStatus) -> None:
    """One line per step of a request, with what an operator searches for; nothing if none was made."""
    status = written.status
    keys = _object_keys(written)
    if status.asked is not None and status.asked != before.asked:
        log.info("ResourceRequest received", **keys, **_spec_keys(written))
    if _step(status) == _step(before):
        return
    if status.phase == "Failed":
        event = "failed" if status.reservation_name else "rejected"
        log.info(f"ResourceRequest {event}", **keys, reason=status.reason, error=status.message)
    elif status.phase == "Pending" and status.reservation_name:
        log.info(
            "ResourceRequest queued",
            **keys,
            reservation=status.reservation_name,
            reason=status.reason,
        )
    elif status.phase in _STEPS:
        log.info(
            _STEPS[status.phase],
            **keys,
            reservation=status.reservation_name,
            cluster=status.target_cluster_id,
            **_spec_keys(written),
            expires_at=_time_text(status.expires_at),
        )


def _step(status: ResourceRequestStatus) -> tuple[str, str, str]:
    """What makes a step: a failover to another cluster is one, a renewal is not."""
    return status.phase, status.reservation_name, status.target_cluster_id


def _object_keys(found: ResourceRequest) -> dict[str, str]:
    return {"namespace": found.metadata.namespace, "name": found.metadata.name}


def _spec_keys(found: ResourceRequest) -> dict[str, str]:
    return {"cpu": found.spec.requested_cpu, "memory": found.spec.requested_memory}


def _time_text(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat()
