"""All that can happen to the ledger, as values. Nothing else changes it.

An event says what was decided; `ledger.apply` works out the record that follows. The store keeps the
records (`Change`), not the events, so that its size follows what exists and not how long it has run.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from kubelend.core.lifecycle import Reason
from kubelend.core.models import Advertisement, Cluster, ClusterId, Reservation, ReservationId


class Event(msgspec.Struct, frozen=True):
    """Something that happened at a time."""

    at: datetime


class Advertised(Event, frozen=True):
    advertisement: Advertisement
    valid_until: datetime


class Cordoned(Event, frozen=True):
    cluster: ClusterId
    why: str


class Uncordoned(Event, frozen=True):
    cluster: ClusterId


class Removed(Event, frozen=True):
    cluster: ClusterId


class Requested(Event, frozen=True):
    """A new reservation: placed at once, or Pending."""

    reservation: Reservation


class ReservationEvent(Event, frozen=True):
    """Something that happened to a reservation which exists."""

    reservation: ReservationId


class Earmarked(ReservationEvent, frozen=True):
    cluster: ClusterId | None


class Placed(ReservationEvent, frozen=True):
    target: ClusterId
    expires_at: datetime
    reason: Reason


class Acknowledged(ReservationEvent, frozen=True):
    """The provider has set the capacity aside."""


class Activated(ReservationEvent, frozen=True):
    """The requester uses it."""


class Renewed(ReservationEvent, frozen=True):
    expires_at: datetime


class Released(ReservationEvent, frozen=True):
    reason: Reason
    message: str


class Failed(ReservationEvent, frozen=True):
    reason: Reason
    message: str


class Forgotten(ReservationEvent, frozen=True):
    """Finished long ago: the ledger drops it, the store archives it."""


class Dropped(msgspec.Struct, frozen=True):
    """A store's instruction: this cluster exists no more."""

    cluster: ClusterId


class Archived(msgspec.Struct, frozen=True):
    """A store's instruction: keep this finished reservation out of the working set."""

    reservation: ReservationId


Change = Cluster | Reservation | Dropped | Archived
"""What an event did, as a store has to keep it: the new record, or that one is gone."""
