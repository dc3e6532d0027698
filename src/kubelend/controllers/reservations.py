"""Reconciles the Reservation objects of the broker's namespace: specs, conditions and deletions; and its
PlacementReviews.

Only the store writes records into objects; this asks it to write again where an object was edited. Rejected
requests have no record, so they are deleted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

import msgspec

from kubelend.broker.service import Broker
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.controllers import events, labels, reservation_plan
from kubelend.controllers.reconciler import DRIFT_GRACE, NextDue, Reconciler
from kubelend.controllers.reservation_plan import ActionKind, ReservationAction
from kubelend.core import models
from kubelend.core.audit_log import AuditEntry
from kubelend.core.errors import InvalidInput, KubelendError, Unavailable
from kubelend.core.explanations import ExplainOthers, Explanation
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.models import ReservationId
from kubelend.kube.client import Client
from kubelend.kube.events import EventRecorder
from kubelend.stores.kubernetes import objects, projection
from kubelend.wire import cluster_namespaces, conversion, validation
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    PlacementReview,
    PlacementReviewStatus,
    Renewal,
    Reservation,
)
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.events import EventRecord
from kubelend.wire.objects import merge_conditions


class ReservationReconciler(Reconciler[Reservation]):
    def __init__(
        self,
        broker: Broker,
        client: Client,
        namespace: str,
        terms: RequestLimits,
        recorder: EventRecorder,
    ) -> None:
        super().__init__(labels.RESERVATION_RESOURCE, broker, client, namespace, recorder)
        self._terms = terms
        self._announced: dict[str, models.Reservation] = {}
        """By object UID: the last record that Events were emitted for."""
        self._rejections_due = NextDue()
        """When the next rejected request may be deleted."""

    def tick(self) -> None:
        """Enqueue rejected requests that may be deleted."""
        now = self._broker.clock()
        if not self._rejections_due.is_due(now) or not self._broker.is_leader:
            return
        self._rejections_due.clear()
        for found in self.cache.all():
            if self._is_due(found, now):
                self.queue.add(found.metadata.name)

    def _enqueue(self, name: str) -> None:
        self.queue.add(name)

    def enqueue_all(self) -> None:
        self._announced.clear()  # another leader may have emitted more since
        super().enqueue_all()

    def _events(self, before: Reservation, after: Reservation) -> Iterable[EventRecord]:
        record = events.recorded(after)
        if record is None:
            return ()
        known = self._announced.get(after.metadata.uid) or events.recorded(before)
        self._announced[after.metadata.uid] = record
        return events.reservation_events(known, record, after)

    def _forget(self, deleted: Reservation) -> None:
        self._announced.pop(deleted.metadata.uid, None)
        super()._forget(deleted)

    # -- reconcile

    async def _sync(self, found: Reservation) -> None:
        action, record = self._plan(found)
        if action is None:
            self._drift.clear(found)
            if record is None and self._is_due(found, self._broker.clock()):
                await self._delete_rejected(found)
        elif action.kind not in _DRIFT_ACTIONS or self._drift.is_persistent(found):
            current = await self._read_current(found.metadata.name)
            if current is not None:  # else the watch reports the deletion
                await self._execute(current, *self._plan(current))

    def _expected_names(self, ledger: Ledger) -> Iterable[str]:
        return [record.id for record in ledger.reservations.values() if _needs_object(record)]

    async def _on_missing(self, name: str) -> None:
        record = self._record(name)
        if record is not None and _needs_object(record) and await self._read_current(name) is None:
            await self._broker.release_and_archive(record.id, Reason.DELETED)

    def _plan(
        self, found: Reservation
    ) -> tuple[ReservationAction | None, models.Reservation | None]:
        record = self._record(found.metadata.name)
        return reservation_plan.plan_reservation(found, record), record

    def _record(self, name: str) -> models.Reservation | None:
        ledger, _ = self._broker.current()
        return ledger.reservations.get(ReservationId(name))

    async def _finalize(self, deleted: Reservation) -> None:
        """The finalizer was removed by others, or the store has finished with the object."""
        record = self._record(deleted.metadata.name)
        if record is None or not _was_object_of(deleted, record):
            return
        if record.phase not in FINAL:
            await self._finalize_live(deleted, record)
        elif not labels.is_managed(deleted.metadata):
            await self._broker.release_and_archive(record.id, record.reason)

    async def _finalize_live(self, deleted: Reservation, record: models.Reservation) -> None:
        """The archive label also removes an object from the watch: then it still exists."""
        found = await self._read_current(deleted.metadata.name)
        if found is not None and found.metadata.uid == deleted.metadata.uid:
            await self._broker.rewrite_record(record)
        else:
            await self._broker.release_and_archive(record.id, Reason.DELETED)

    async def _execute(
        self,
        found: Reservation,
        action: ReservationAction | None,
        record: models.Reservation | None,
    ) -> None:
        name, kind = ReservationId(found.metadata.name), action and action.kind
        match kind:
            case ActionKind.RESERVE:
                await self._reserve(found)
            case ActionKind.ACTIVATE:
                await self._broker.activate(name)
            case ActionKind.RENEW if found.spec.renewal is not None:
                await self._renew(found, found.spec.renewal)
            case ActionKind.RELEASE if action is not None:
                await self._broker.release(name, action.reason)
            case ActionKind.FORGET if record is not None:
                await self._forget_record(found, record)
            case ActionKind.REPAIR if record and self._drift.may_repair(found, action):
                await self._broker.rewrite_record(record)
                self.queue.add_after(name, DRIFT_GRACE)  # no event follows if nothing was written
            case ActionKind.OBSERVE_GENERATION:
                await self._update_status(found, {})
            case ActionKind.REMOVE_FINALIZER | ActionKind.DELETE_ORPHAN | ActionKind.RESET:
                await self._broker.check_fencing()  # the ledger of another leader may have a record
                await self._clean_up(found, kind)

    async def _clean_up(self, found: Reservation, kind: ActionKind) -> None:
        """An object without a record."""
        match kind:
            case ActionKind.REMOVE_FINALIZER:
                others = [one for one in found.metadata.finalizers if one != RESERVATION_FINALIZER]
                await self._patch(found, {"metadata": {"finalizers": others}})
            case ActionKind.DELETE_ORPHAN:
                await self._delete_orphan(found)
            case ActionKind.RESET:
                await self._update_status(found, {"record": None, "phase": None, "reason": None})

    async def _reserve(self, found: Reservation) -> None:
        try:
            request = projection.request_from_object(found, self._terms)
            labels.check_not_revoked(self._broker.members, request.requester)
            await self._broker.reserve(request, ReservationId(found.metadata.name))
        except KubelendError as error:
            if not error.retryable:
                await self._reject(found, error)
                return
            # Unless the broker itself is the cause, show the reason once. The phase stays empty.
            if not isinstance(error, Unavailable) and found.status.reason != error.code:
                status = {"reason": error.code, "message": str(error)}
                await self._update_status(found, {**status, "lastUpdateTime": self._broker.clock()})
            raise

    async def _renew(self, found: Reservation, renewal: Renewal) -> None:
        """Once: a renewal that the broker rejects is not tried again."""
        try:
            longer = conversion.renewal_duration(renewal.duration, self._terms)
            await self._broker.renew(ReservationId(found.metadata.name), longer)
        except KubelendError as error:
            if error.retryable:
                raise
            self._recorder.emit(EventRecord("Warning", "NotRenewed", str(error), found))
        await self._update_status(found, {"renewTime": renewal.time})

    async def _reject(self, found: Reservation, error: KubelendError) -> None:
        """Final: a request that should wait for capacity sets spec.wait."""
        name, now = found.metadata.name, self._broker.clock()
        status = {
            "phase": Phase.FAILED.value,
            "reason": error.code,
            "message": str(error),
            "finishedAt": now,
            "lastUpdateTime": now,
        }
        await self._broker.check_fencing()
        if await self._update_status(found, status):
            self._recorder.emit(EventRecord("Warning", "Failed", str(error), found))
            actor, subject, reason = CURRENT_ACTOR.get(), f"reservation/{name}", error.message
            self._broker.append_audit(
                AuditEntry(now, actor, "reserve", subject, code=error.code, message=reason)
            )

    def _is_due(self, found: Reservation, now: datetime) -> bool:
        """Whether it was rejected long enough ago; if not, the time is noted."""
        return self._rejections_due.has_passed(
            labels.rejected_until(found, self._broker.retention), now
        )

    async def _delete_rejected(self, found: Reservation) -> None:
        await self._broker.check_fencing()
        if not await labels.delete_if_unchanged(self._client, self.resource, found):
            self.queue.add(found.metadata.name)

    async def _forget_record(self, found: Reservation, record: models.Reservation) -> None:
        await self._broker.release_and_archive(record.id, Reason.DELETED)
        if labels.is_being_deleted(found.metadata) and record.phase not in FINAL:
            message = "Released reserved resources because the Reservation was deleted"
            self._recorder.emit(EventRecord("Normal", "Released", message, found))
        elif not labels.is_being_deleted(found.metadata):
            # Its name was taken by another record, and is free now.
            self.queue.add(found.metadata.name)

    async def _update_status(self, found: Reservation, status: dict[str, object]) -> bool:
        """Patch status fields that the store does not write."""
        fields = {**status, "observedGeneration": found.metadata.generation}
        return await self._patch(found, {"status": fields}, "status") is not None


class PlacementReviewReconciler(Reconciler[PlacementReview]):
    """Evaluates each review once, and deletes it later. Writes nothing to the ledger."""

    def __init__(
        self,
        broker: Broker,
        client: Client,
        namespace: str,
        terms: RequestLimits,
        recorder: EventRecorder,
    ) -> None:
        super().__init__(labels.REVIEW_RESOURCE, broker, client, namespace, recorder)
        self._terms = terms
        self._deletion_due = NextDue()

    def tick(self) -> None:
        now = self._broker.clock()
        if self._broker.is_leader and self._deletion_due.is_due(now):
            self._deletion_due.clear()
            self.cache.enqueue_all()

    def _enqueue(self, name: str) -> None:
        self.queue.add(name)

    def _expected_names(self, ledger: Ledger) -> Iterable[str]:  # noqa: ARG002
        return ()

    async def _on_missing(self, name: str) -> None:
        """Nothing refers to a review."""

    async def _finalize(self, deleted: PlacementReview) -> None:
        """Nothing is held for a review."""

    async def _sync(self, found: PlacementReview) -> None:
        created, now = found.metadata.creation_timestamp, self._broker.clock()
        if self._deletion_due.has_passed(created and created + REVIEW_RETENTION, now):
            await labels.delete_if_unchanged(self._client, self.resource, found)
        elif not found.status.conditions:
            await self._patch(found, {"status": await self._evaluate(found)}, "status")

    async def _evaluate(self, found: PlacementReview) -> dict[str, object]:
        explanation, refusal, generation = None, None, found.metadata.generation
        try:
            explanation = conversion.from_explanation(await self._explain(found))
        except KubelendError as error:
            if error.retryable:
                raise
            refusal = error
        accepted = cluster_namespaces.accepted_condition(refusal, generation)
        conditions = merge_conditions((), [accepted], self._broker.clock())
        status = PlacementReviewStatus(explanation, tuple(conditions), generation)
        fields: dict[str, object] = msgspec.to_builtins(status)
        return fields

    async def _explain(self, found: PlacementReview) -> Explanation:
        spec, record = found.spec, None
        if spec.reservation_name:
            record = await self._broker.reservation(ReservationId(spec.reservation_name))
            request = record.request
        elif spec.request is not None:
            requester = validation.check_plain(spec.requester_id, "requesterID")
            requester_id = models.ClusterId(requester or found.metadata.namespace)
            request = conversion.to_request(spec.request, requester_id, "", self._terms)
        else:
            raise InvalidInput("the spec has neither a request nor a reservation")
        # Who may create reviews may also read the advertisements in this namespace.
        return await self._broker.explain(request, spec.limit, record, ExplainOthers.NAMES)


REVIEW_RETENTION: Final = timedelta(minutes=10)
"""How long a review can be read."""

_DRIFT_ACTIONS: Final = (
    ActionKind.REPAIR,
    ActionKind.DELETE_ORPHAN,
    ActionKind.RESET,
)


def _needs_object(record: models.Reservation) -> bool:
    """Whether an object must exist: a finished one may be deleted by any client."""
    if objects.requesting_uid(record):
        return True
    is_named = objects.record_object_name("reservation", record.id) == record.id
    return is_named and record.phase not in FINAL


def _was_object_of(deleted: Reservation, record: models.Reservation) -> bool:
    """Whether it was this record's object, and not another one of the same name."""
    asked_by = objects.requesting_uid(record)
    return labels.is_managed(deleted.metadata) or asked_by in ("", deleted.metadata.uid)
