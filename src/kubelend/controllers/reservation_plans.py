"""Decides what to do about a Reservation object, from the object and the ledger's record. Pure.

`controllers.reservations` carries the actions out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from kubelend.controllers import marks, specs
from kubelend.core import models
from kubelend.core.errors import InvalidInput
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.models import ClusterId
from kubelend.stores import kube_objects, kube_projection
from kubelend.wire import conversion, texts
from kubelend.wire.broker_objects import Condition, Reservation
from kubelend.wire.conversion import Terms


class Reserve(NamedTuple):
    """It is a new request."""


class Activate(NamedTuple):
    """The requester has set RequesterActive."""


class Release(NamedTuple):
    """The reservation is to be released."""

    reason: Reason


class Retire(NamedTuple):
    """The record's object is deleted, or about to be: release what it holds, and forget the record."""


class Rewrite(NamedTuple):
    """The object differs from the record. `fields` are those that differ, with their values in the object."""

    spoilt: tuple[tuple[str, object], ...]


class LetGo(NamedTuple):
    """Nothing is held for it: the finalizer can go."""


class Delete(NamedTuple):
    """It is labelled as managed by the broker, which has no record of it."""


class StartOver(NamedTuple):
    """It has a stored record that the ledger does not know: it becomes a request again."""


class Observe(NamedTuple):
    """Only status.observedGeneration is to be updated."""


Action: TypeAlias = (
    Reserve | Activate | Release | Retire | Rewrite | LetGo | Delete | StartOver | Observe | None
)


def plan(found: Reservation, record: models.Reservation | None) -> Action:
    """The next action; None if there is none."""
    if record is not None and not _belongs(found, record):
        return Retire()
    if marks.is_leaving(found.metadata):
        return _at_leaving(found, record)
    if record is None:
        return _without_record(found)
    requested = _asked_by_conditions(found, record)
    return _kept_right(found, record) if requested is None else requested


def request(found: Reservation, terms: Terms) -> models.Request:
    """The request in the spec; `InvalidInput` if it is invalid."""
    name, spec = found.metadata.name, found.spec
    if kube_objects.name_of("reservation", name) != name:
        raise InvalidInput(
            f"the name {name[:40]!r} cannot be used", hint="choose one of at most 240 characters"
        )
    requester = ClusterId(
        texts.checked(spec.requester_id, "requesterID") or found.metadata.namespace
    )
    key = marks.key_of(found.metadata)
    return conversion.to_request(specs.request(spec), requester, key, terms)


def _belongs(found: Reservation, record: models.Reservation) -> bool:
    """Names are unique: if the record is not this object's, then the record's object is deleted."""
    if marks.is_own(found.metadata) or found.status.record is not None:
        return True
    return record.request.key == marks.key_of(found.metadata)


def _at_leaving(found: Reservation, record: models.Reservation | None) -> Action:
    if record is None:
        return LetGo() if marks.holds_on(found.metadata) else None
    if not marks.is_own(found.metadata):
        return Retire()
    # REST clients can still look it up by its ID for a while.
    if record.phase not in FINAL:
        return Release(Reason.DELETED)
    return Rewrite((("finalizers", ()),)) if marks.holds_on(found.metadata) else None


def _without_record(found: Reservation) -> Action:
    if marks.is_own(found.metadata):
        return Delete()
    if found.status.phase in FINAL:
        return None
    return Reserve() if found.status.record is None else StartOver()


def _asked_by_conditions(found: Reservation, record: models.Reservation) -> Action:
    if record.phase in FINAL:
        return None
    if _is_true(found, "RequesterReleased") is not None:
        return Release(Reason.BY_REQUESTER)
    active = _is_true(found, "RequesterActive")
    if active is not None and record.phase is Phase.RESERVED and _is_news(active, record):
        return Activate()
    return None


def _is_true(found: Reservation, type: str) -> Condition | None:
    conditions = (one for one in found.status.conditions if one.type == type)
    return next((one for one in conditions if one.status == "True"), None)


def _is_news(active: Condition, record: models.Reservation) -> bool:
    """RequesterActive set for one provider does not count for the next after a failover."""
    if not record.left or record.reserved_at is None:
        return True
    at = active.last_transition_time
    return at is not None and at >= record.reserved_at


def _kept_right(found: Reservation, record: models.Reservation) -> Action:
    if drifted := tuple(_spoilt(found, record)):
        return Rewrite(drifted)
    is_noted = found.status.observed_generation == found.metadata.generation
    return None if is_noted or marks.is_own(found.metadata) else Observe()


def _spoilt(found: Reservation, record: models.Reservation) -> Iterator[tuple[str, object]]:
    """Fields that somebody has edited, or the store has not written yet."""
    if not marks.is_kept(found.status.record, record):
        yield "record", found.status.record and found.status.record.checksum
    if not marks.holds_on(found.metadata):
        yield "finalizers", found.metadata.finalizers
    yield from _spoilt_spec(found, record)
    current = msgspec.to_builtins(found.status)
    for name, value in kube_projection.reservation_status(record).items():
        if (current.get(name) or None) != (value or None):
            yield name, current.get(name)


def _spoilt_spec(found: Reservation, record: models.Reservation) -> Iterator[tuple[str, object]]:
    """Of a user's own spec the broker writes the target cluster only."""
    wanted, current = kube_projection.reservation_spec(record), msgspec.to_builtins(found.spec)
    if marks.is_own(found.metadata):
        if current != wanted:
            yield "spec", current
    elif wanted.get("targetClusterID", "") not in ("", found.spec.target_cluster_id):
        yield "targetClusterID", found.spec.target_cluster_id
