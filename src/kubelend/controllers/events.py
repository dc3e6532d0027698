"""Kubernetes Events on objects that users applied, as shown by `kubectl describe`.

Pure. Objects that the broker manages have none, because their users receive everything over the REST
interface. Events follow from what the broker has recorded or written: a status that somebody edits causes
none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Literal

from kubelend.controllers import labels
from kubelend.core import models
from kubelend.core.lifecycle import Phase, Reason
from kubelend.stores.batch import CorruptRecord
from kubelend.stores.kubernetes import projection
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.events import EventRecord

COMPONENT: Final = "kubelend-broker"


def recorded(found: Reservation) -> models.Reservation | None:
    """The stored record of a user's object; None if it has none that can be decoded."""
    stored = found.status.record
    if stored is None or labels.is_managed(found.metadata):
        return None
    with suppress(CorruptRecord):
        record: models.Reservation = projection.decode_record_text(
            "reservation", stored.data.encode()
        )
        return record
    return None


def reservation_events(
    was: models.Reservation | None, now: models.Reservation, found: Reservation
) -> Iterator[EventRecord]:
    if (was is None or was.phase != now.phase) and (event_reason := _EVENT_REASONS.get(now.phase)):
        reason = "Expired" if now.reason == Reason.EXPIRED else event_reason
        kind: Literal["Normal", "Warning"] = "Warning" if reason == "Failed" else "Normal"
        yield EventRecord(kind, reason, now.message, found)
    elif now.phase == Phase.RESERVED and was is not None and was.target != now.target:
        yield EventRecord("Normal", "Moved", now.message, found)


def advertisement_events(
    before: ClusterAdvertisement, after: ClusterAdvertisement
) -> Iterator[EventRecord]:
    was, now = before.status.phase, after.status.phase
    if labels.is_managed(after.metadata):
        return
    if was != now and now == "Stale":
        yield EventRecord("Warning", "Stale", after.status.message, after)
    elif was == "Stale" and now == "Active":
        yield EventRecord("Normal", "Active", "The cluster advertises again", after)
    if _is_overcommitted(after) and not _is_overcommitted(before):
        yield EventRecord("Warning", "Overcommitted", after.status.message, after)


_EVENT_REASONS: Final[dict[str, str]] = {
    Phase.RESERVED: "Reserved",
    Phase.ACTIVE: "Activated",
    Phase.RELEASED: "Released",
    Phase.FAILED: "Failed",
}


def _is_overcommitted(found: ClusterAdvertisement) -> bool:
    conditions = found.status.conditions
    return any(one.type == "Overcommitted" and one.status == "True" for one in conditions)
