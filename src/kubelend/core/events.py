"""Events, the changes a store persists, and the working set it loads.

An event describes a decision; `Ledger.apply` computes the resulting record and is the only
mutation. Stores persist records (`Change`), not events, so that their size depends on what exists
and not on uptime. The class name of an event is its action in the audit log.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.core.audit_log import AuditEntry, AuditLine, ChainHead
from kubelend.core.lending import LendingPolicy
from kubelend.core.lifecycle import Reason
from kubelend.core.members import Member, MemberId, Token, TokenId
from kubelend.core.models import (
    Advertisement,
    Cluster,
    ClusterId,
    HoldReport,
    Limits,
    Quota,
    Reservation,
    ReservationId,
)


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""

    at: datetime


class Advertised(Event, frozen=True):
    advertisement: Advertisement
    valid_until: datetime
    certificate_until: datetime | None = None


class Cordoned(Event, frozen=True):
    cluster: ClusterId
    reason: str


class Uncordoned(Event, frozen=True):
    cluster: ClusterId


class ClusterRemoved(Event, frozen=True):
    cluster: ClusterId


class Requested(Event, frozen=True):
    """A new reservation: Reserved or Pending."""

    reservation: Reservation


class TakenOver(Event, frozen=True):
    """A reservation that another broker has made, as it left it."""

    reservation: Reservation


class ReservationEvent(Event, frozen=True):
    """An event of an existing reservation."""

    reservation: ReservationId


class Nominated(ReservationEvent, frozen=True):
    cluster: ClusterId | None


class Placed(ReservationEvent, frozen=True):
    target: ClusterId
    expires_at: datetime
    reason: Reason
    hourly: int = 0
    currency: str = ""
    detail: str = ""
    """Why it left the previous provider; empty if an actor in the audit log caused it."""


class FailoverBlocked(ReservationEvent, frozen=True):
    """The provider is unreachable and no other cluster fits; the reservation stays on it."""

    message: str


class ProviderRecovered(ReservationEvent, frozen=True):
    """The provider is reachable again."""


class Acknowledged(ReservationEvent, frozen=True):
    """The provider holds the resources."""


class HoldReported(ReservationEvent, frozen=True):
    """The provider reports whether its nodes really keep the resources."""

    held: HoldReport


class Activated(ReservationEvent, frozen=True):
    """The requester has started to use it."""


class Renewed(ReservationEvent, frozen=True):
    expires_at: datetime


class Released(ReservationEvent, frozen=True):
    reason: Reason
    message: str


class Failed(ReservationEvent, frozen=True):
    reason: Reason
    message: str


class RetentionExpired(ReservationEvent, frozen=True):
    """The retention of a finished reservation has passed: the ledger evicts it, the store archives it."""


class LimitsEvent(Event, frozen=True):
    """An administrator changed the limits of a cluster."""

    cluster: ClusterId


class PolicySet(LimitsEvent, frozen=True):
    policy: LendingPolicy | None


class QuotaSet(LimitsEvent, frozen=True):
    quota: Quota | None


class MembershipEvent(Event, frozen=True):
    """An event of a member or a token."""


class MemberChanged(MembershipEvent, frozen=True):
    """Carries the new record of a member. The subclasses give the cause."""

    member: Member


class JoinRequested(MemberChanged, frozen=True):
    """The member waits for approval."""


class JoinDenied(MemberChanged, frozen=True):
    """An administrator rejected the join request; an existing membership is unchanged."""


class MemberApproved(MemberChanged, frozen=True):
    """The member may obtain certificates."""


class CertificateIssued(MemberChanged, frozen=True):
    """A certificate was issued or renewed."""


class MemberRevoked(MemberChanged, frozen=True):
    """All existing certificates of the member are rejected from now on."""


class MemberRemoved(MembershipEvent, frozen=True):
    member: MemberId


class TokenChanged(MembershipEvent, frozen=True):
    """Carries the new record of a token. The subclasses give the cause."""

    token: Token


class TokenCreated(TokenChanged, frozen=True):
    pass


class TokenUsed(TokenChanged, frozen=True):
    """A member joined with the token; it has one use less."""


class TokenRemoved(MembershipEvent, frozen=True):
    token: TokenId


class ClusterDeleted(msgspec.Struct, frozen=True):
    """Store change: delete this cluster."""

    cluster: ClusterId


class Archived(msgspec.Struct, frozen=True):
    """Store change: move this finished reservation from the working set to the archive."""

    reservation: ReservationId


class RecordDeleted(msgspec.Struct, frozen=True):
    """Store change: delete this member, token or set of limits."""

    kind: DocumentKind
    id: str


class AuditLogTruncated(msgspec.Struct, frozen=True):
    """Store change: audit log lines up to this number may be deleted."""

    line: int


class AuditLogCopied(msgspec.Struct, frozen=True):
    """Store change: the whole audit log of another store, for an empty one."""

    start: ChainHead
    lines: Sequence[AuditLine]


DocumentKind = Literal["member", "token", "limits"]
Change = (
    Cluster
    | Reservation
    | Member
    | Token
    | Limits
    | ClusterDeleted
    | Archived
    | RecordDeleted
    | AuditEntry
    | AuditLogTruncated
    | AuditLogCopied
)
"""A change that a store persists: a new record, a deletion or archival, or an audit log entry."""


class LeftByAnother(NamedTuple):
    """What another broker left in a new store, to be taken over by `commands.take_over`."""

    advertisements: Sequence[Advertisement] = ()
    reservations: Sequence[Reservation] = ()


NOTHING_LEFT = LeftByAnother()


class WorkingSet(NamedTuple):
    """All live records of a store, from which a ledger is restored."""

    clusters: Sequence[Cluster]
    reservations: Sequence[Reservation]
    revision: int
    members: Sequence[Member] = ()
    tokens: Sequence[Token] = ()
    limits: Sequence[Limits] = ()
    left: LeftByAnother = NOTHING_LEFT

    def reservations_by_age(self) -> list[Reservation]:
        """The reservations, oldest first, without nominations of clusters that no longer exist.

        A cluster may have been deleted while no broker was running; its waiter is nominated again.
        """
        offered_or_none = {None, *(cluster.id for cluster in self.clusters)}
        known = (
            found
            if found.nominated_cluster in offered_or_none
            else replace(found, nominated_cluster=None)
            for found in self.reservations
        )
        return sorted(known, key=attrgetter("ticket"))


class StoreLag(NamedTuple):
    """How far what a store shows to others is behind what it has committed."""

    committed: int = 0
    """Number of the last commit."""
    written: int = 0
    """Number of the last commit that is shown completely."""
    changes: int = 0
    """Number of changes that are not shown yet."""
    seconds: float = 0.0
    """Age of the oldest of them."""


class CommittedChanges(NamedTuple):
    """The changes of one commit, for a replica that has applied all earlier ones."""

    changes: Sequence[Change]
    revision: int
