"""Audit entries of events."""

from __future__ import annotations

from kubelend.core.events import (
    Advertised,
    Change,
    Cordoned,
    Earmarked,
    Event,
    Forgotten,
    LimitsEvent,
    MembershipEvent,
    Removed,
    Requested,
    ReservationEvent,
    Uncordoned,
)
from kubelend.core.journal import Actor, Entry, Subject, facts
from kubelend.core.ledger import Ledger
from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, Reservation

_UNTOLD = (Earmarked, Forgotten)
"""Internal bookkeeping without effect on what a cluster holds or may do."""


def before(ledger: Ledger, event: Event) -> Subject | None:
    """The record that an event will change; None if it is new."""
    match event:
        case Requested():
            return None
        case ReservationEvent():
            return ledger.reservations.get(event.reservation)
        case Advertised():
            return ledger.clusters.get(event.advertisement.cluster)
        case Cordoned() | Uncordoned() | Removed():
            return ledger.clusters.get(event.cluster)
        case MembershipEvent():
            return ledger.registry.before(event)
        case LimitsEvent():
            return ledger.rulebook.limits.get(event.cluster)
    raise TypeError(f"unknown event: {type(event).__name__}")


def entry_of(actor: Actor, event: Event, before: Subject | None, change: Change) -> Entry | None:
    """The audit entry of an event; None if it is not audited."""
    if isinstance(event, _UNTOLD) or _says_the_same(event, before, change):
        return None
    after = change if isinstance(change, Subject) else None
    subject = name_of(after or before)
    return Entry(event.at, actor, type(event).__name__, subject, before, after)


def name_of(record: Subject | None) -> str:
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


def _says_the_same(event: Event, before: Subject | None, change: Change) -> bool:
    """Whether an advertisement only updates measurements: these arrive every few seconds and are
    not audited.
    """
    if not (isinstance(event, Advertised) and isinstance(before, Cluster)):
        return False
    old, new = before.advertisement, event.advertisement
    said = (old.labels, old.prices, old.endpoint, old.policy)
    if said == (new.labels, new.prices, new.endpoint, new.policy):
        return True
    return isinstance(change, Cluster) and facts(before) == facts(change)
