"""JSON bodies for administrators and for joining: members, tokens, limits, audit log and certificates."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kubelend.wire import patterns
from kubelend.wire.bodies import Body, Duration, Name, Reason, Timestamp
from kubelend.wire.certificate_bodies import Pem

JoiningRole = Literal["cluster", "viewer", "admin"]
Pin = Annotated[
    str,
    Meta(
        max_length=71,
        description="`sha256:` followed by the SHA-256 hash of a public key in hex digits",
    ),
]

DEFAULT_TTL = "15m"


class TokenRequest(Body, frozen=True):
    """Request to create a join token."""

    ttl: Duration = DEFAULT_TTL
    role: JoiningRole = "cluster"
    name: Annotated[str, Meta(extra_json_schema=patterns.COMMON_NAME)] = ""
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
    ends_at: Timestamp
    authority: Pin


class Member(Body, frozen=True):
    """A member: joined, waiting for approval, or revoked."""

    role: str
    name: str
    standing: Annotated[str, Meta(description="Pending, Accepted or Revoked")]
    asked_at: Timestamp
    asks: Pin = ""
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


class AcceptRequest(Body, frozen=True):
    """Key to approve. Defaults to the key that waits."""

    key: Pin = ""
    keep_old: bool = False
    """Keep trusting certificates of the previously approved key."""


class RevokeRequest(Body, frozen=True):
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
    let_in: list[str] = msgspec.field(default_factory=list)
    """Members (role/name) that this administrator approved. They remain and should be reviewed."""


class Removal(Body, frozen=True):
    """Result of the removal of a member."""

    refused: bool
    """Whether the member still has valid certificates, which are rejected."""
    refused_until: Timestamp | None = None
    """Time at which the last of these certificates expires. If empty, they are rejected until the member is
    approved again.
    """
    tokens: list[str] = msgspec.field(default_factory=list)
    let_in: list[str] = msgspec.field(default_factory=list)
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

    standing: str
    key: Pin
    """Pin of the requesting key, as shown to the administrator."""
