"""All that can happen to the ledger, as values. Nothing else changes it.

An event says what was decided; `ledger.apply` works out the record that follows. The store keeps the
records (`Change`), not the events, so that its size follows what exists and not how long it has run.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from kubelend.core.journal import Entry
from kubelend.core.lending import LendingPolicy
from kubelend.core.lifecycle import Reason
from kubelend.core.limits import Limits, Quota
from kubelend.core.members import Member, MemberId, Token, TokenId
from kubelend.core.models import Advertisement, Cluster, ClusterId, Reservation, ReservationId


class Event(msgspec.Struct, frozen=True):
    """Something that happened at a time."""

    at: datetime


class Advertised(Event, frozen=True):
    advertisement: Advertisement
    valid_until: datetime
    certificate_until: datetime | None = None


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
    hourly: int = 0
    currency: str = ""
    why: str = ""
    """Why it has left the provider before, as a sentence; empty where somebody knows who did it."""


class Stranded(ReservationEvent, frozen=True):
    """Its provider is silent and no other fits: it stays, and says so."""

    message: str


class Regained(ReservationEvent, frozen=True):
    """Its provider is heard again."""


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


class LimitsEvent(Event, frozen=True):
    """An administrator set limits for a cluster."""

    cluster: ClusterId


class PolicySet(LimitsEvent, frozen=True):
    policy: LendingPolicy | None


class QuotaSet(LimitsEvent, frozen=True):
    quota: Quota | None


class MembershipEvent(Event, frozen=True):
    """Something that happened to a member or a token."""


class MemberChanged(MembershipEvent, frozen=True):
    """What a member is from now on. The subclasses say why."""

    member: Member


class JoinRequested(MemberChanged, frozen=True):
    """It waits for an administrator."""


class JoinRejected(MemberChanged, frozen=True):
    """It waits no more, and stays what it was."""


class MemberAccepted(MemberChanged, frozen=True):
    """It may have certificates."""


class CertificateIssued(MemberChanged, frozen=True):
    """It has been given one: at first, or in place of an older one."""


class MemberRevoked(MemberChanged, frozen=True):
    """None of its certificates is believed any more."""


class MemberRemoved(MembershipEvent, frozen=True):
    member: MemberId


class TokenChanged(MembershipEvent, frozen=True):
    """What a token is from now on. The subclasses say why."""

    token: Token


class TokenCreated(TokenChanged, frozen=True):
    pass


class TokenUsed(TokenChanged, frozen=True):
    """Somebody came in with it, and it has one use less."""


class TokenRemoved(MembershipEvent, frozen=True):
    token: TokenId


class Dropped(msgspec.Struct, frozen=True):
    """A store's instruction: this cluster exists no more."""

    cluster: ClusterId


class Archived(msgspec.Struct, frozen=True):
    """A store's instruction: keep this finished reservation out of the working set."""

    reservation: ReservationId


class Erased(msgspec.Struct, frozen=True):
    """A store's instruction: this member, token or set of limits exists no more."""

    kind: Kind
    id: str


class Cut(msgspec.Struct, frozen=True):
    """A store's instruction: the journal need not keep its lines up to this one any longer."""

    line: int


Kind = Literal["member", "token", "limits"]
Change = Cluster | Reservation | Member | Token | Limits | Dropped | Archived | Erased | Entry | Cut
"""What an event did, as a store has to keep it: the new record, that one is gone, or a line to tell."""
