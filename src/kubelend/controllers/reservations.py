"""Reservation objects of the broker's namespace: what people apply, set as a condition and delete there.

A part of `controllers.office`. Level-triggered: whatever happened, one look at an object compares it with its
record in the ledger, and does what is missing. Records are written into objects by the store alone; this only
asks it to do so again where somebody has spoilt one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kubelend.broker.service import Broker
from kubelend.broker.writer import ACTOR
from kubelend.controllers import ghosts, happenings, marks, reservation_plans, standings
from kubelend.controllers.happenings import Riddles, Teller
from kubelend.controllers.looking import Looks
from kubelend.controllers.mirrors import Mirror, Turn
from kubelend.controllers.reservation_plans import (
    Action,
    Activate,
    Delete,
    LetGo,
    Observe,
    Release,
    Reserve,
    Retire,
    Rewrite,
    StartOver,
)
from kubelend.controllers.suspicions import GRAVE_AFTER, Suspicions
from kubelend.core import models
from kubelend.core.errors import Conflict, KubelendError, NotFound, Unavailable
from kubelend.core.journal import Actor, Entry
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.models import ReservationId
from kubelend.kube.client import Client
from kubelend.stores import kube_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation
from kubelend.wire.conversion import Terms


class Reservations:
    """Hand `mirror.take` what the watch says, and run `looks`."""

    def __init__(
        self, broker: Broker, client: Client, namespace: str, terms: Terms, teller: Teller
    ) -> None:
        self.looks = Looks(marks.RESERVATIONS.plural, self._look)
        self.mirror: Mirror[Reservation] = Mirror(self.looks.add, self._turned)
        self._broker = broker
        self._client = client
        self._namespace = namespace
        self._terms = terms
        self._teller = teller
        self._riddles = Riddles(Reservation, teller)
        self._suspicions = Suspicions(self.looks)

    def look_at_all(self) -> None:
        """The ledger was read anew, this broker leads from now on, or the objects were listed."""
        self.mirror.look_at_all()
        # One that leads no more, and has not noticed yet, is told to look at all again when it does.
        with suppress(Unavailable):
            ledger, _ = self._broker.present()
            for record in ledger.reservations.values():
                if kube_objects.asked_by(record) and self.mirror.find(record.id) is None:
                    self.looks.add(record.id)

    def _turned(self, turn: Turn[Reservation]) -> None:
        if self._broker.may_decide:
            for happening in happenings.of_reservation(turn.before, turn.after):
                self._teller.tell(happening)

    async def _look(self, name: str) -> None:
        if not self._broker.may_decide:
            for gone in self.mirror.gone(name):  # whoever leads sees to it
                self._bury(gone)
            return
        ACTOR.set(Actor(f"{self._namespace}/{name}", "object"))
        for gone in self.mirror.gone(name):
            await self._end(gone)
            self._bury(gone)
        self._riddles.look(name, self.mirror.unreadable(name))
        found = self.mirror.find(name)
        if found is None:
            await self._look_for_orphan(name)
        elif self.mirror.unreadable(name) is None:
            await self._look_at(found)

    def _bury(self, gone: Reservation) -> None:
        self._suspicions.clear(gone)
        self.mirror.bury(gone)

    async def _look_at(self, found: Reservation) -> None:
        action, _ = self._planned(found)
        if action is None:
            self._suspicions.clear(found)
        elif not isinstance(action, _SUSPICIOUS) or self._suspicions.is_grave(found):
            await self._look_closely(found.metadata.name)

    async def _look_closely(self, name: str) -> None:
        """At the object as it is, with all that was decided written into it."""
        await self._broker.settled()
        found = await self._client.find(marks.RESERVATIONS, name, self._namespace)
        if found is None:
            return  # the watch is going to tell
        action, record = self._planned(found)
        await self._do(found, action, record)

    async def _look_for_orphan(self, name: str) -> None:
        """A record whose object has gone while nobody was watching."""
        ledger, _ = self._broker.present()
        record = ledger.reservations.get(ReservationId(name))
        if record is None or not kube_objects.asked_by(record) or not self.mirror.is_complete:
            return
        if self.mirror.unreadable(name) is not None:
            return  # it is there, whatever it says
        await self._broker.settled()
        if await self._client.find(marks.RESERVATIONS, name, self._namespace) is None:
            await self._broker.retire(record.id, Reason.DELETED)

    def _planned(self, found: Reservation) -> tuple[Action, models.Reservation | None]:
        ledger, _ = self._broker.present()
        record = ledger.reservations.get(ReservationId(found.metadata.name))
        return reservation_plans.plan(found, record), record

    async def _end(self, gone: Reservation) -> None:
        """Our finalizer was taken off by somebody else, or the store is done with it."""
        ledger, _ = self._broker.present()
        record = ledger.reservations.get(ReservationId(gone.metadata.name))
        if record is None or not _is_of(gone, record):
            return
        if record.phase not in FINAL:
            await self._broker.retire(record.id, Reason.DELETED)
        elif not marks.is_own(gone.metadata):
            await self._broker.retire(record.id, record.reason)

    async def _do(
        self, found: Reservation, action: Action, record: models.Reservation | None
    ) -> None:
        name = ReservationId(found.metadata.name)
        match action:
            case Reserve():
                await self._reserve(found)
            case Activate():
                await self._broker.activate(name)
            case Release(reason):
                await self._broker.release(name, reason)
            case Retire() if record is not None:
                await self._retire(found, record)
            case Rewrite() if record is not None and self._suspicions.may_write(found, action):
                await self._broker.rewrite(record)
                self.looks.add_after(name, GRAVE_AFTER)  # if nothing was written, nobody tells
            case _:
                await self._edit(found, action)

    async def _edit(self, found: Reservation, action: Action) -> None:
        """What the store does not do."""
        match action:
            case LetGo():
                await self._let_go(found)
            case Delete():
                if not await ghosts.remove(self._client, marks.RESERVATIONS, found, self._teller):
                    self.looks.add(found.metadata.name)
            case StartOver():
                await self._say(found, {"kept": None, "phase": None, "reason": None})
            case Observe():
                await self._say(found, {})

    async def _reserve(self, found: Reservation) -> None:
        try:
            request = reservation_plans.request(found, self._terms)
            standings.check(self._broker.registry, request.requester)
            await self._broker.reserve(request, ReservationId(found.metadata.name))
        except KubelendError as error:
            if not error.retryable:
                await self._refuse(found, error)
                return
            if not isinstance(error, Unavailable):  # then it is not the broker that has to wait
                await self._put_off(found, error)
            raise

    async def _put_off(self, found: Reservation, error: KubelendError) -> None:
        """Say once why nothing comes of it yet. It has no phase, for it is asked again."""
        if found.status.reason != error.code:
            status = {"reason": error.code, "message": str(error)}
            await self._say(found, {**status, "lastUpdateTime": self._broker.clock()})

    async def _refuse(self, found: Reservation, error: KubelendError) -> None:
        """Final: whoever would rather wait says so in the wish."""
        name, now = found.metadata.name, self._broker.clock()
        status = {
            "phase": Phase.FAILED.value,
            "reason": error.code,
            "message": str(error),
            "finishedAt": now,
            "lastUpdateTime": now,
        }
        if await self._say(found, status):
            actor, subject, why = ACTOR.get(), f"reservation/{name}", error.message
            self._broker.tell(Entry(now, actor, "reserve", subject, code=error.code, message=why))

    async def _retire(self, found: Reservation, record: models.Reservation) -> None:
        await self._broker.retire(record.id, Reason.DELETED)
        if marks.is_leaving(found.metadata) and record.phase not in FINAL:
            message = "What it held was given back, for it was deleted"
            self._teller.tell(happenings.at_deletion(found, message))
        elif not marks.is_leaving(found.metadata):
            self.looks.add(found.metadata.name)  # another had its name, and now it can have it

    async def _let_go(self, found: Reservation) -> None:
        others = [name for name in found.metadata.finalizers if name != RESERVATION_FINALIZER]
        await self._patch(found, {"metadata": {"finalizers": others}})

    async def _say(self, found: Reservation, status: dict[str, object]) -> bool:
        """Beside what the store writes: what it does not know."""
        said = {**status, "observedGeneration": found.metadata.generation}
        return await self._patch(found, {"status": said}, "status")

    async def _patch(
        self, found: Reservation, change: dict[str, dict[str, object]], subresource: str = ""
    ) -> bool:
        """On what was seen. Where somebody else was faster, the watch tells, and another look follows."""
        known = found.metadata
        metadata = {**change.get("metadata", {}), "resourceVersion": known.resource_version}
        whole = {**change, "metadata": metadata}
        try:
            await self._client.patch(
                marks.RESERVATIONS, known.name, self._namespace, whole, subresource=subresource
            )
        except Conflict:
            self.looks.add(known.name)
            return False
        except NotFound:
            return False  # the watch is going to tell
        return True


_SUSPICIOUS: Final = (Rewrite, Delete, StartOver)


def _is_of(gone: Reservation, record: models.Reservation) -> bool:
    """Whether it was this record's object, and not one of the same name before or after it."""
    asked_by = kube_objects.asked_by(record)
    return marks.is_own(gone.metadata) or asked_by in ("", gone.metadata.uid)
