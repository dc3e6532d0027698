"""Decides what to do about a Reservation object, from the object and the ledger's record. Pure.

`controllers.reservations` carries the actions out.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from typing import NamedTuple

import msgspec

from kubelend.controllers import labels
from kubelend.core import models
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.stores.kubernetes import objects, projection
from kubelend.wire.broker_objects import Reservation
from kubelend.wire.objects import Condition


class ActionKind(Enum):
    """What to do, each with the state of the object that requires it."""

    RESERVE = "it is a new request"
    ACTIVATE = "the requester uses the resources"
    RENEW = "the requester has renewed it"
    RELEASE = "the reservation is to be released"
    FORGET = "the record's object is deleted, or about to be: nothing refers to the record any more"
    REPAIR = "the object differs from the record"
    REMOVE_FINALIZER = "nothing is held for it: the finalizer can go"
    DELETE_ORPHAN = "it is labelled as managed by the broker, which has no record of it"
    RESET = "it has a stored record that the ledger does not know: it becomes a request again"
    OBSERVE_GENERATION = "only status.observedGeneration is to be updated"


class ReservationAction(NamedTuple):
    kind: ActionKind
    reason: Reason = Reason.BY_REQUESTER
    """Of a release."""
    fields: tuple[tuple[str, object], ...] = ()
    """The fields to repair, with their values in the object."""


def plan_reservation(
    found: Reservation, record: models.Reservation | None
) -> ReservationAction | None:
    """The next action; None if there is none."""
    # Names are unique: if the record is not this object's, then the record's object is deleted.
    is_own = labels.is_managed(found.metadata) or found.status.record is not None
    key = objects.request_key_for_uid(found.metadata.uid)
    if record is not None and not is_own and record.request.key != key:
        return ReservationAction(ActionKind.FORGET)
    if labels.is_being_deleted(found.metadata):
        return _plan_deletion(found, record)
    if record is None:
        return _plan_without_record(found)
    requested = wanted_change(found, record)
    return _plan_repair(found, record) if requested is None else requested


def _plan_deletion(
    found: Reservation, record: models.Reservation | None
) -> ReservationAction | None:
    if record is None:
        return (
            ReservationAction(ActionKind.REMOVE_FINALIZER)
            if labels.has_finalizer(found.metadata)
            else None
        )
    if not labels.is_managed(found.metadata):
        return ReservationAction(ActionKind.FORGET)
    # REST clients can still look it up by its ID for a while.
    if record.phase not in FINAL:
        return ReservationAction(ActionKind.RELEASE, Reason.DELETED)
    is_held = labels.has_finalizer(found.metadata)
    return ReservationAction(ActionKind.REPAIR, fields=(("finalizers", ()),)) if is_held else None


def _plan_without_record(found: Reservation) -> ReservationAction | None:
    if labels.is_managed(found.metadata):
        return ReservationAction(ActionKind.DELETE_ORPHAN)
    if found.status.phase in FINAL:
        return None
    return (
        ReservationAction(ActionKind.RESERVE)
        if found.status.record is None
        else ReservationAction(ActionKind.RESET)
    )


def wanted_change(found: Reservation, record: models.Reservation) -> ReservationAction | None:
    """What the requester wants of an unfinished reservation, by spec or conditions; in all namespaces."""
    if record.phase in FINAL:
        return None
    if found.spec.released or _true_condition(found, "RequesterReleased") is not None:
        return ReservationAction(ActionKind.RELEASE)
    if record.phase is Phase.RESERVED and uses_provider(
        found, record.target or "", record.reserved_at, has_moved=bool(record.left)
    ):
        return ReservationAction(ActionKind.ACTIVATE)
    renewal = found.spec.renewal
    is_new = renewal is not None and renewal.time != found.status.renew_time
    return ReservationAction(ActionKind.RENEW) if is_new else None


def uses_provider(
    found: Reservation, provider: str, reserved_at: datetime | None, *, has_moved: bool
) -> bool:
    """Whether the requester uses this provider, and not a previous one of the reservation."""
    if provider and found.spec.active_cluster_id == provider:
        return True
    active = _true_condition(found, "RequesterActive")
    if active is None or not has_moved or reserved_at is None:
        return active is not None
    at = active.last_transition_time
    return at is not None and at >= reserved_at


def _true_condition(found: Reservation, type: str) -> Condition | None:
    conditions = (one for one in found.status.conditions if one.type == type)
    return next((one for one in conditions if one.status == "True"), None)


def _plan_repair(found: Reservation, record: models.Reservation) -> ReservationAction | None:
    if drifted := tuple(_drifted_fields(found, record)):
        return ReservationAction(ActionKind.REPAIR, fields=drifted)
    is_noted = found.status.observed_generation == found.metadata.generation
    return (
        None
        if is_noted or labels.is_managed(found.metadata)
        else ReservationAction(ActionKind.OBSERVE_GENERATION)
    )


def _drifted_fields(found: Reservation, record: models.Reservation) -> Iterator[tuple[str, object]]:
    """Fields that a user has edited, or the store has not written yet."""
    if not labels.has_record(found.status.record, record):
        yield "record", found.status.record and found.status.record.checksum
    if not labels.has_finalizer(found.metadata):
        yield "finalizers", found.metadata.finalizers
    yield from _drifted_spec_fields(found, record)
    current = msgspec.to_builtins(found.status)
    for name, value in projection.reservation_status(record).items():
        if (current.get(name) or None) != (value or None):
            yield name, current.get(name)


def _drifted_spec_fields(
    found: Reservation, record: models.Reservation
) -> Iterator[tuple[str, object]]:
    """Of a user's own spec the broker writes the target cluster only."""
    wanted, current = projection.reservation_spec(record), msgspec.to_builtins(found.spec)
    if labels.is_managed(found.metadata):
        if current != wanted:
            yield "spec", current
    elif wanted.get("targetClusterID", "") not in ("", found.spec.target_cluster_id):
        yield "targetClusterID", found.spec.target_cluster_id
