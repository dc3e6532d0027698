"""JSON bodies for administrators and for joining: members, tokens, limits, audit log and certificates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kubelend.wire import json_types
from kubelend.wire.bodies import (
    AmountsByName,
    Body,
    Currency,
    Duration,
    EffectivePolicy,
    LendingPolicy,
    Name,
    Price,
    Reason,
    Timestamp,
)


class Actor(Body, frozen=True):
    """Authenticated caller and its address."""

    name: str
    role: str
    remote: str = ""
    via: Annotated[str, Meta(description="Proxy that forwarded the request")] = ""


class AuditLine(Body, frozen=True):
    """One audit line: a change, or a rejected request."""

    number: Annotated[int, Meta(ge=1)]
    at: Timestamp
    actor: Actor
    action: Annotated[str, Meta(description="Name of the event, or of the rejected route")]
    subject: Annotated[str, Meta(description="kind/name")]
    digest: Annotated[
        str, Meta(description="SHA-256 over the previous digest and the text of this line")
    ]
    before: dict[str, Any] = msgspec.field(default_factory=dict)
    after: dict[str, Any] = msgspec.field(default_factory=dict)
    code: Annotated[
        str, Meta(description="Error code of a rejected request; absent for a change")
    ] = ""
    message: str = ""


class AuditLog(Body, frozen=True):
    """One page of audit lines, newest first. `next` is the continue token of the following page."""

    lines: list[AuditLine]
    next: str = ""


Pem = Annotated[str, Meta(max_length=64 * 1024, description="PEM text")]


class CertificateRequest(Body, frozen=True):
    """Certificate signing request. Only its key is used: name and role come from the caller's certificate."""

    request: Annotated[
        str,
        Meta(max_length=16 * 1024, description="PEM text"),
        Meta(extra_json_schema=json_types.CERTIFICATE_REQUEST),
    ]


class IssuedCertificate(Body, frozen=True):
    """A new certificate and the trusted authorities."""

    certificate: Pem
    """Certificate chain: the holder's certificate first, then the intermediates up to an authority."""

    authorities: Pem


JoiningRole = Literal["cluster", "viewer", "admin"]
Pin = Annotated[
    str,
    Meta(
        max_length=71,
        description="`sha256:` followed by the SHA-256 hash of a public key in hex digits",
    ),
]

DEFAULT_TTL = "15m"


class TokenRequest(Body, frozen=True, forbid_unknown_fields=True):
    """Request to create a join token."""

    ttl: Duration = DEFAULT_TTL
    role: JoiningRole = "cluster"
    name: Annotated[str, Meta(extra_json_schema=json_types.COMMON_NAME)] = ""
    """Only a client with this name may join. Without it, an administrator has to approve names that the
    broker does not expect.
    """
    uses: Annotated[int, Meta(ge=1, le=1000)] = 1


class NewToken(Body, frozen=True):
    """A new join token, with what a client needs to join. The token is not shown again."""

    token: str
    id: str
    role: str
    expires_at: Timestamp
    uses: int
    enrol_port: int
    """Enrolment port on the broker's host."""
    ca_hash: Pin
    """Pin that authenticates the broker to the client."""
    certificate_lifetime: Duration
    name: str = ""


class Token(Body, frozen=True):
    """A join token without its secret, which the broker does not store."""

    id: str
    state: Annotated[str, Meta(description="Valid, Used or Expired")]
    role: str
    uses_left: int
    created_at: Timestamp
    created_by: str
    expires_at: Timestamp
    name: str = ""


class TokenList(Body, frozen=True):
    """All join tokens, oldest first."""

    tokens: list[Token]


class MemberCertificate(Body, frozen=True):
    """The latest certificate that the broker issued to a member."""

    serial: str
    issued_at: Timestamp
    expires_at: Timestamp
    authority: Pin


class Member(Body, frozen=True):
    """A member: joined, waiting for approval, or revoked."""

    role: str
    name: str
    status: Annotated[str, Meta(description="Pending, Approved or Revoked")]
    requested_at: Timestamp
    pending_key: Pin = ""
    """Pin of a key that waits for approval to join under this name."""
    token: str = ""
    decided_at: Timestamp | None = None
    decided_by: str = ""
    certificate: MemberCertificate | None = None
    revoked_at: Timestamp | None = None
    reason: str = ""


class MemberList(Body, frozen=True):
    """One page of members. `next` is the continue token of the following page."""

    members: list[Member]
    next: str = ""


class ApproveRequest(Body, frozen=True, forbid_unknown_fields=True):
    """Key to approve. Defaults to the key that waits."""

    key: Pin = ""
    keep_old: bool = False
    """Keep trusting certificates of the previously approved key."""


class RevokeRequest(Body, frozen=True, forbid_unknown_fields=True):
    """How to treat the member's reservations, and the reason."""

    release: bool = False
    """Release what the member borrowed and move what it lends. Otherwise both stay until they end."""
    reason: Reason = ""


class Revocation(Body, frozen=True):
    """Result of a revocation."""

    member: Member
    known: bool
    """Whether a member of this name was known before."""
    released: list[str] = msgspec.field(default_factory=list)
    """Released reservations of the member."""
    drained: list[str] = msgspec.field(default_factory=list)
    """Reservations at the member's cluster: moved to other clusters, or released."""
    tokens: list[str] = msgspec.field(default_factory=list)
    """Join tokens created by this administrator, now deleted."""
    approved: list[str] = msgspec.field(default_factory=list)
    """Members (role/name) that this administrator approved. They remain and should be reviewed."""


class Removal(Body, frozen=True):
    """Result of the removal of a member."""

    rejected: bool
    """Whether the member still has valid certificates, which are rejected."""
    rejected_until: Timestamp | None = None
    """Time at which the last of these certificates expires. If empty, they are rejected until the member is
    approved again.
    """
    tokens: list[str] = msgspec.field(default_factory=list)
    approved: list[str] = msgspec.field(default_factory=list)
    """Tokens and approvals of a removed administrator, as in a revocation."""


class JoinRequest(Body, frozen=True):
    """Request to join, sent to the enrolment listener."""

    token: Annotated[str, Meta(max_length=200)]
    name: Name
    request: Pem
    role: Name = ""


class JoinResult(Body, frozen=True):
    """Response to an approved join request."""

    certificate: Pem
    authorities: Pem
    port: int
    """API port on the broker's host."""


class JoinPending(Body, frozen=True):
    """Response to a join request that waits for approval. Repeat the request until it is decided."""

    status: str
    key: Pin
    """Pin of the requesting key, as shown to the administrator."""


Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class PolicyRequest(LendingPolicy, frozen=True, forbid_unknown_fields=True):
    """Lending policy set by an administrator for a cluster. Replaces the previous one."""


class PolicyStatus(Body, frozen=True):
    """Lending policies of a cluster."""

    cluster_id: str
    admin: LendingPolicy | None = None
    """Policy set by an administrator."""
    advertised: LendingPolicy | None = None
    """Policy advertised by the cluster."""
    effective: EffectivePolicy | None = None
    """Policy in effect: the stricter of both. Absent if nothing is limited."""


class PolicyList(Body, frozen=True):
    """One page of lending policies. `next` is the continue token of the following page."""

    policies: list[PolicyStatus]
    next: str = ""


class QuotaRequest(Body, frozen=True, forbid_unknown_fields=True):
    """Quota of a cluster: maximum amounts held and waited for, and maximum spend per day (UTC)."""

    amounts: AmountsByName = msgspec.field(default_factory=dict)
    """Maximum amounts by resource. Resources that are not listed are not limited; zero allows none."""
    reservations: Count | None = None
    budget: Price = ""
    currency: Currency = "USD"
    """Currency of the budget."""


class Quota(Body, frozen=True):
    """A quota that is set."""

    amounts: dict[str, str] = msgspec.field(default_factory=dict)
    reservations: int | None = None
    budget: str = ""
    currency: str = ""


class QuotaUse(Body, frozen=True):
    """Current usage of a quota."""

    held: dict[str, str] = msgspec.field(default_factory=dict)
    waited_for: dict[str, str] = msgspec.field(default_factory=dict)
    reservations: int = 0
    waiting: int = 0
    spent_today: str = ""
    """Spend of the current day (UTC), including the cost of running reservations until its end."""


class QuotaStatus(Body, frozen=True):
    """Quota of a cluster and its usage."""

    cluster_id: str
    quota: Quota
    used: QuotaUse


class QuotaList(Body, frozen=True):
    """One page of quotas. `next` is the continue token of the following page."""

    quotas: list[QuotaStatus]
    next: str = ""
