"""Reconciles the Reservation objects of the broker's namespace: specs, conditions and deletions.

Only the store writes records into objects; this asks it to write again where an object was edited. Rejected
requests have no record, so they are deleted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from kubelend.broker.service import Broker
from kubelend.broker.writer import ACTOR
from kubelend.controllers import (
    ghosts,
    happenings,
    marks,
    refusals,
    removals,
    reservation_plans,
    standings,
)
from kubelend.controllers.alarms import Alarm
from kubelend.controllers.controller import Controller
from kubelend.controllers.happenings import Happening, Teller
from kubelend.controllers.mirrors import Turn
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
from kubelend.controllers.suspicions import GRAVE_AFTER
from kubelend.core import models
from kubelend.core.errors import Conflict, KubelendError, NotFound, Unavailable
from kubelend.core.journal import Entry
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.models import ReservationId
from kubelend.kube.client import Client
from kubelend.stores import kube_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation
from kubelend.wire.conversion import Terms


class Reservations(Controller[Reservation]):
    """Pass watch events to `cache.handle`, and run `queue`."""

    def __init__(
        self, broker: Broker, client: Client, namespace: str, terms: Terms, teller: Teller
    ) -> None:
        super().__init__(marks.RESERVATIONS, broker, client, namespace, teller)
        self._terms = terms
        self._removals = Alarm()
        """When the next rejected request may be deleted."""

    def tick(self) -> None:
        """Enqueue rejected requests that may be deleted."""
        now = self._broker.clock()
        if not self._removals.rings(now) or not self._broker.may_decide:
            return
        self._removals.turn_off()
        for found in self.mirror.all():
            if self._is_due(found, now):
                self.looks.add(found.metadata.name)

    def _notice(self, name: str) -> None:
        self.looks.add(name)

    def _happened(self, turn: Turn[Reservation]) -> Iterable[Happening]:
        return happenings.of_reservation(turn.before, turn.after)

    # -- reconcile

    async def _serve(self, found: Reservation) -> None:
        action, record = self._planned(found)
        if action is None:
            self._suspicions.clear(found)
            if record is None and self._is_due(found, self._broker.clock()):
                await self._remove(found)
        elif not isinstance(action, _SUSPICIOUS) or self._suspicions.is_grave(found):
            await self._look_closely(found.metadata.name)

    async def _look_closely(self, name: str) -> None:
        """Act on the object as it is on the server, after all decisions so far were written."""
        found = await self._found(name)
        if found is None:
            return  # the watch reports the deletion
        action, record = self._planned(found)
        await self._do(found, action, record)

    def _expected(self, ledger: Ledger) -> Iterable[str]:
        return [record.id for record in ledger.reservations.values() if _has_object(record)]

    async def _miss(self, name: str) -> None:
        record = self._record(name)
        if record is not None and _has_object(record) and await self._found(name) is None:
            await self._broker.retire(record.id, Reason.DELETED)

    def _planned(self, found: Reservation) -> tuple[Action, models.Reservation | None]:
        record = self._record(found.metadata.name)
        return reservation_plans.plan(found, record), record

    def _record(self, name: str) -> models.Reservation | None:
        ledger, _ = self._broker.present()
        return ledger.reservations.get(ReservationId(name))

    async def _end(self, gone: Reservation) -> None:
        """The finalizer was removed by others, or the store has finished with the object."""
        record = self._record(gone.metadata.name)
        if record is None or not _is_of(gone, record):
            return
        if record.phase not in FINAL:
            await self._end_live(gone, record)
        elif not marks.is_own(gone.metadata):
            await self._broker.retire(record.id, record.reason)

    async def _end_live(self, gone: Reservation, record: models.Reservation) -> None:
        """The archive label also removes an object from the watch: then it still exists."""
        found = await self._found(gone.metadata.name)
        if found is not None and found.metadata.uid == gone.metadata.uid:
            await self._broker.rewrite(record)
        else:
            await self._broker.retire(record.id, Reason.DELETED)

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
                self.looks.add_after(name, GRAVE_AFTER)  # no event follows if nothing was written
            case _:
                await self._edit(found, action)

    async def _edit(self, found: Reservation, action: Action) -> None:
        """Actions that the store does not carry out."""
        if isinstance(action, _UNKNOWN):
            await self._broker.confirm()
        match action:
            case LetGo():
                await self._let_go(found)
            case Delete():
                if not await ghosts.remove(self._client, marks.RESERVATIONS, found, self._teller):
                    self.looks.add(found.metadata.name)
            case StartOver():
                await self._say(found, {"record": None, "phase": None, "reason": None})
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
            if not isinstance(error, Unavailable):  # then the broker itself is not the cause
                await self._put_off(found, error)
            raise

    async def _put_off(self, found: Reservation, error: KubelendError) -> None:
        """Show the reason once. The phase stays empty, because the request is retried."""
        if found.status.reason != error.code:
            status = {"reason": error.code, "message": str(error)}
            await self._say(found, {**status, "lastUpdateTime": self._broker.clock()})

    async def _refuse(self, found: Reservation, error: KubelendError) -> None:
        """Final: a request that should wait for capacity sets spec.wait."""
        name, now = found.metadata.name, self._broker.clock()
        status = {
            "phase": Phase.FAILED.value,
            "reason": error.code,
            "message": str(error),
            "finishedAt": now,
            "lastUpdateTime": now,
        }
        await self._broker.confirm()
        if await self._say(found, status):
            actor, subject, reason = ACTOR.get(), f"reservation/{name}", error.message
            self._broker.tell(
                Entry(now, actor, "reserve", subject, code=error.code, message=reason)
            )

    def _is_due(self, found: Reservation, now: datetime) -> bool:
        """Whether it was rejected long enough ago; if not, the time is noted."""
        return self._removals.is_over(refusals.due(found, self._broker.retention), now)

    async def _remove(self, found: Reservation) -> None:
        await self._broker.confirm()
        if not await removals.remove(self._client, marks.RESERVATIONS, found):
            self.looks.add(found.metadata.name)

    async def _retire(self, found: Reservation, record: models.Reservation) -> None:
        await self._broker.retire(record.id, Reason.DELETED)
        if marks.is_leaving(found.metadata) and record.phase not in FINAL:
            message = "Released reserved resources because the Reservation was deleted"
            self._teller.tell(happenings.at_deletion(found, message))
        elif not marks.is_leaving(found.metadata):
            self.looks.add(
                found.metadata.name
            )  # its name was taken by another record, and is free now

    async def _let_go(self, found: Reservation) -> None:
        others = [name for name in found.metadata.finalizers if name != RESERVATION_FINALIZER]
        await self._patch(found, {"metadata": {"finalizers": others}})

    async def _say(self, found: Reservation, status: dict[str, object]) -> bool:
        """Patch status fields that the store does not write."""
        fields = {**status, "observedGeneration": found.metadata.generation}
        return await self._patch(found, {"status": fields}, "status")

    async def _patch(
        self, found: Reservation, change: dict[str, dict[str, object]], subresource: str = ""
    ) -> bool:
        """With a precondition. After a conflict the object is reconciled again."""
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
            return False  # the watch reports the deletion
        return True


_SUSPICIOUS: Final = (Rewrite, Delete, StartOver)
_UNKNOWN: Final = (LetGo, Delete, StartOver)
"""Actions on objects without a record here: the ledger of another leader may have one."""


def _has_object(record: models.Reservation) -> bool:
    """Whether an object must exist: a finished one may be deleted by anybody."""
    if kube_objects.asked_by(record):
        return True
    is_named = kube_objects.name_of("reservation", record.id) == record.id
    return is_named and record.phase not in FINAL


def _is_of(gone: Reservation, record: models.Reservation) -> bool:
    """Whether it was this record's object, and not another one of the same name."""
    asked_by = kube_objects.asked_by(record)
    return marks.is_own(gone.metadata) or asked_by in ("", gone.metadata.uid)
