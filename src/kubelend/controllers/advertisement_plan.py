"""Decides what to do about a ClusterAdvertisement object, and computes its spec and status. Pure.

`controllers.advertisements` patches what differs. The store writes the record and its timestamps.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from kubelend.broker.service import ClusterView
from kubelend.controllers import labels
from kubelend.core import models
from kubelend.kube import resources
from kubelend.stores.kubernetes import objects, projection
from kubelend.wire import bodies, conversion, quantities, validation
from kubelend.wire.bodies import Amounts
from kubelend.wire.broker_objects import (
    CORDON_ANNOTATION,
    DRAIN_ANNOTATION,
    UNCORDON_ANNOTATION,
    ClusterAdvertisement,
    ClusterAdvertisementStatus,
)
from kubelend.wire.objects import Condition, Metadata, merge_conditions

MergePatch = dict[str, object]


def spec_patch(found: ClusterAdvertisement, view: ClusterView) -> MergePatch:
    """The merge patch that corrects reserved and available; empty if they are correct."""
    current, left = found.spec.resources, (view.cluster.ceiling - view.reserved).clamped()
    before, after = {}, {}
    for name, shown, amounts in (
        ("available", current.available, left),
        ("reserved", current.reserved, view.reserved),
    ):
        if shown is not None or amounts:  # nothing need not be shown
            before[name] = {} if shown is None else _amount_texts(shown)
            after[name] = _amount_texts(quantities.to_quantities(amounts))
    changed = resources.merge_patch(before, after)
    return {"resources": changed} if changed else {}


def status_patch(
    found: ClusterAdvertisement, view: ClusterView | None, error: str, now: datetime
) -> MergePatch:
    """The merge patch of the status; empty if nothing differs. `error` is a problem with the spec."""
    if view is None:  # it is not in the ledger, because it is invalid
        wanted = ClusterAdvertisementStatus(
            message=error,
            conditions=found.status.conditions,
            observed_generation=found.metadata.generation,
        )
    else:
        wanted = _status_from_view(found, view, error, now)
    before, after = _status_fields(found.status), _status_fields(wanted)
    changed = {
        name: after.get(name) for name in _STATUS_FIELDS if before.get(name) != after.get(name)
    }
    if "phase" in changed:
        changed["active"] = wanted.active  # explicitly, or the printer column would be empty
    is_news = changed.keys() - {"observedGeneration", "conditions"} or (
        _without_generation(found.status) != _without_generation(wanted)
    )
    # The store raises the generation of managed objects with every advertisement; no client waits for that.
    if not is_news and labels.is_managed(found.metadata):
        return {}
    return changed


_STATUS_FIELDS: Final = (
    *("phase", "lastUpdateTime", "active", "message", "score", "conditions"),
    *("observedGeneration", "validUntil", "cordonReason", "reservations"),
)


def _status_from_view(
    found: ClusterAdvertisement, view: ClusterView, error: str, now: datetime
) -> ClusterAdvertisementStatus:
    status = conversion.from_cluster_status(*view, now)
    generation = found.metadata.generation
    message = error or _status_message(status, view)
    wanted = [
        _ready_condition(status, message),
        _condition("Stale", "AdvertisementAge", _stale_message(status), is_true=not status.active),
        _condition("Overcommitted", "ResourceCheck", status.message, is_true=bool(status.message)),
    ]
    noted = [msgspec.structs.replace(one, observed_generation=generation) for one in wanted]
    return ClusterAdvertisementStatus(
        phase=status.phase,
        last_update_time=status.last_update_time,
        active=status.active and not status.cordoned,
        message=message,
        score=status.score,
        conditions=merge_conditions(found.status.conditions, noted, now),
        observed_generation=generation,
        valid_until=status.valid_until,
        cordon_reason=status.cordon_reason,
        reservations=status.reservations,
    )


def _status_message(status: bodies.ClusterStatus, view: ClusterView) -> str:
    if not status.active:
        return _stale_message(status)
    if status.message:
        return status.message
    return f"Closed to new reservations: {status.cordon_reason}" if view.cluster.cordon else ""


def _ready_condition(status: bodies.ClusterStatus, message: str) -> Condition:
    if not status.active:
        return _condition("Ready", "ClusterStale", message, is_true=False)
    if status.cordoned:
        return _condition("Ready", "ClusterCordoned", message, is_true=False)
    return _condition("Ready", "ClusterActive", message, is_true=True)


def _stale_message(status: bodies.ClusterStatus) -> str:
    return (
        ""
        if status.active
        else f"Stale: no advertisement since {status.last_update_time:%Y-%m-%dT%H:%M:%SZ}"
    )


def _condition(type: str, reason: str, message: str, *, is_true: bool) -> Condition:
    return Condition(type, "True" if is_true else "False", reason, message)


def _without_generation(status: ClusterAdvertisementStatus) -> list[Condition]:
    return [msgspec.structs.replace(one, observed_generation=0) for one in status.conditions]


def _amount_texts(amounts: Amounts) -> MergePatch:
    texts: MergePatch = msgspec.to_builtins(amounts)
    return {name: value for name, value in texts.items() if value not in ("", {})}


def _status_fields(status: ClusterAdvertisementStatus) -> MergePatch:
    texts: MergePatch = msgspec.to_builtins(status)
    return {**texts, "active": status.active}


REJECTED_PREFIX: Final = "Rejected: "
"""Prefix of the status message of an object whose spec was rejected."""


class AdvertisementAction(Enum):
    """What to do, each with the state of the object that requires it."""

    ADVERTISE = "it has a new spec, or one that this broker has not processed yet"
    IGNORE_OUTDATED = "the spec is new, but older than the cluster's latest advertisement"
    REPAIR = "it differs from the record"
    DELETE_ORPHAN = "it is labelled as managed by the broker, which has no record of it"


def plan_advertisement(
    found: ClusterAdvertisement,
    advertisement: models.Advertisement | None,
    processed: models.Advertisement | None,
    record: models.Cluster | None,
) -> AdvertisementAction | None:
    """The next action before the status is written; None if there is none.

    `advertisement` is the one in the spec, None if it is rejected; `processed` the last one processed from
    this object, None if unknown.
    """
    if labels.is_being_deleted(found.metadata):
        return None
    if labels.is_managed(found.metadata):
        if record is None:
            return AdvertisementAction.DELETE_ORPHAN
        return None if _matches_record(found, record) else AdvertisementAction.REPAIR
    if advertisement is not None and (
        record is None or _is_unprocessed(found, advertisement, processed, record)
    ):
        is_outdated = _is_outdated(advertisement, processed, record)
        return AdvertisementAction.IGNORE_OUTDATED if is_outdated else AdvertisementAction.ADVERTISE
    if record is None or not is_record_object(found):
        return None
    return None if labels.has_record(found.status.record, record) else AdvertisementAction.REPAIR


class AdminRequest(NamedTuple):
    """What an administrator asks for by an annotation."""

    annotation: str
    reason: str


def admin_request(found: Metadata) -> AdminRequest | None:
    for annotation in (UNCORDON_ANNOTATION, CORDON_ANNOTATION, DRAIN_ANNOTATION):
        if annotation in found.annotations:
            text = validation.to_single_line(found.annotations[annotation])[
                : bodies.MAX_REASON_LENGTH
            ]
            return AdminRequest(annotation, text or "by an administrator")
    return None


def is_record_object(found: ClusterAdvertisement) -> bool:
    """Whether this is the object, by its name, in which the store has the cluster's record."""
    return objects.record_object_name("cluster", found.spec.cluster_id) == found.metadata.name


def is_withdrawn(
    deleted: ClusterAdvertisement, processed: models.Advertisement | None, record: models.Cluster
) -> bool:
    """Whether the deleted object was the source of what the ledger holds.

    If the ledger has a newer advertisement from elsewhere, the store creates the object again.
    """
    if labels.is_managed(deleted.metadata):
        return labels.has_record(deleted.status.record, record)
    return record.advertisement == processed


def _is_unprocessed(
    found: ClusterAdvertisement,
    advertisement: models.Advertisement,
    processed: models.Advertisement | None,
    record: models.Cluster,
) -> bool:
    """Whether it is not processed yet. After a restart the status decides."""
    if processed is not None:
        return advertisement != processed
    status = found.status
    was_seen = status.observed_generation == found.metadata.generation
    was_processed = was_seen and not status.message.startswith(REJECTED_PREFIX)
    return not was_processed and advertisement != record.advertisement


def _is_outdated(
    advertisement: models.Advertisement,
    processed: models.Advertisement | None,
    record: models.Cluster | None,
) -> bool:
    """For one object the latest spec counts; among several sources the latest measurement."""
    if record is None or record.advertisement == processed:
        return False
    return advertisement.sent_at < record.advertisement.sent_at


def _matches_record(found: ClusterAdvertisement, record: models.Cluster) -> bool:
    """Compared as the server has it: not every record fits the type that objects are decoded into."""
    wanted = projection.comparable_spec(projection.cluster_spec(record))
    is_same_spec = projection.comparable_spec(msgspec.to_builtins(found.spec)) == wanted
    return is_same_spec and labels.has_record(found.status.record, record)
