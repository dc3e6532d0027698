"""Audit entries of events."""

from __future__ import annotations

from kubelend.core.events import (
    Advertised,
    Change,
    ClusterRemoved,
    Cordoned,
    Event,
    LimitsEvent,
    MembershipEvent,
    Nominated,
    Requested,
    ReservationEvent,
    RetentionExpired,
    Uncordoned,
)
from kubelend.core.journal import Actor, AuditedRecord, AuditEntry, audited_fields
from kubelend.core.ledger import Ledger
from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, Reservation

_NOT_AUDITED = (Nominated, RetentionExpired)
"""Internal bookkeeping without effect on what a cluster holds or may do."""


def record_before(ledger: Ledger, event: Event) -> AuditedRecord | None:
    """The record that an event will change; None if it is new."""
    match event:
        case Requested():
            return None
        case ReservationEvent():
            return ledger.reservations.get(event.reservation)
        case Advertised():
            return ledger.clusters.get(event.advertisement.cluster)
        case Cordoned() | Uncordoned() | ClusterRemoved():
            return ledger.clusters.get(event.cluster)
        case MembershipEvent():
            return ledger.member_index.record_before(event)
        case LimitsEvent():
            return ledger.limit_index.limits.get(event.cluster)
    raise TypeError(f"unknown event: {type(event).__name__}")


def audit_entry(
    actor: Actor, event: Event, before: AuditedRecord | None, change: Change
) -> AuditEntry | None:
    """The audit entry of an event; None if it is not audited."""
    if isinstance(event, _NOT_AUDITED) or _is_unchanged_offer(event, before, change):
        return None
    after = change if isinstance(change, AuditedRecord) else None
    subject = subject_name(after or before)
    return AuditEntry(event.at, actor, type(event).__name__, subject, before, after)


def subject_name(record: AuditedRecord | None) -> str:
    """The audit subject of a record: `kind/name`."""
    match record:
        case Reservation():
            return f"reservation/{record.id}"
        case Cluster():
            return f"cluster/{record.id}"
        case Member():
            return f"member/{record.id}"
        case Token():
            return f"token/{record.id}"
        case Limits():
            return f"limits/{record.id}"
    raise TypeError(f"not an audited record: {record!r}")


def _is_unchanged_offer(event: Event, before: AuditedRecord | None, change: Change) -> bool:
    """Whether an advertisement only updates measurements: these arrive every few seconds and are
    not audited.
    """
    if not (isinstance(event, Advertised) and isinstance(before, Cluster)):
        return False
    old, new = before.advertisement, event.advertisement
    said = (old.labels, old.prices, old.endpoint, old.policy)
    if said == (new.labels, new.prices, new.endpoint, new.policy):
        return True
    return isinstance(change, Cluster) and audited_fields(before) == audited_fields(change)
