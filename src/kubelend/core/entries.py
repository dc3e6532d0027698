"""What the journal says of each event. Pure; called for every event that is applied."""

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
"""How the broker keeps house: nobody's right or share changes by it."""


def before(ledger: Ledger, event: Event) -> Subject | None:
    """The record that an event is about to change; None if there is none yet."""
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
    raise TypeError(f"the ledger knows no {type(event).__name__}")


def entry_of(actor: Actor, event: Event, before: Subject | None, change: Change) -> Entry | None:
    """The entry of an event, with the record before it; None if there is nothing to tell."""
    if isinstance(event, _UNTOLD) or _says_the_same(event, before, change):
        return None
    after = change if isinstance(change, Subject) else None
    subject = name_of(after or before)
    return Entry(event.at, actor, type(event).__name__, subject, before, after)


def name_of(record: Subject | None) -> str:
    """`kind/name` of a record."""
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
    raise TypeError(f"no subject: {record!r}")


def _says_the_same(event: Event, before: Subject | None, change: Change) -> bool:
    """An advertisement comes every few seconds, and mostly measures anew what is known."""
    if not (isinstance(event, Advertised) and isinstance(before, Cluster)):
        return False
    old, new = before.advertisement, event.advertisement
    said = (old.labels, old.prices, old.endpoint, old.policy)
    if said == (new.labels, new.prices, new.endpoint, new.policy):
        return True
    return isinstance(change, Cluster) and facts(before) == facts(change)
