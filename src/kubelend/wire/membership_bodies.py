"""The JSON bodies about who belongs: tokens, members, and how they are let in and put out."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kubelend.wire import patterns
from kubelend.wire.bodies import Body, Duration, Name, Reason, Timestamp
from kubelend.wire.certificate_bodies import Pem

JoiningRole = Literal["cluster", "viewer", "admin"]
Pin = Annotated[
    str, Meta(max_length=71, description="sha256: and the hash of a public key, in hex digits")
]

DEFAULT_TTL = "15m"


class TokenRequest(Body, frozen=True):
    """Who may join with a token, how often and until when."""

    ttl: Duration = DEFAULT_TTL
    role: JoiningRole = "cluster"
    name: Annotated[str, Meta(extra_json_schema=patterns.COMMON_NAME)] = ""
    """The only one that may; others have to be accepted, if the broker does not expect them."""
    uses: Annotated[int, Meta(ge=1, le=1000)] = 1


class NewToken(Body, frozen=True):
    """A token, told this once, and what a newcomer needs beside it."""

    token: str
    id: str
    role: str
    expires_at: Timestamp
    uses: int
    enrol_port: int
    """Where it joins, on the broker's host."""
    ca_hash: Pin
    """By which it knows the broker."""
    certificate_lifetime: Duration
    name: str = ""


class Token(Body, frozen=True):
    """A token without its secret, which the broker does not know."""

    id: str
    state: Annotated[str, Meta(description="Valid, Used or Expired")]
    role: str
    uses_left: int
    created_at: Timestamp
    created_by: str
    expires_at: Timestamp
    name: str = ""


class TokenList(Body, frozen=True):
    """All tokens, the oldest first."""

    tokens: list[Token]


class MemberCertificate(Body, frozen=True):
    """The newest certificate that the broker issued to a member."""

    serial: str
    issued_at: Timestamp
    ends_at: Timestamp
    authority: Pin


class Member(Body, frozen=True):
    """Who joined, waits to join, or was put out."""

    role: str
    name: str
    standing: Annotated[str, Meta(description="Pending, Accepted or Revoked")]
    asked_at: Timestamp
    asks: Pin = ""
    """The key that asks to join in this name, and waits for an administrator."""
    token: str = ""
    decided_at: Timestamp | None = None
    decided_by: str = ""
    certificate: MemberCertificate | None = None
    revoked_at: Timestamp | None = None
    reason: str = ""


class MemberList(Body, frozen=True):
    """One page of members; `next` continues it."""

    members: list[Member]
    next: str = ""


class AcceptRequest(Body, frozen=True):
    """Which key is accepted; whichever asks, if empty."""

    key: Pin = ""
    keep_old: bool = False
    """Go on believing the certificates of another key that was in until now."""


class RevokeRequest(Body, frozen=True):
    """What becomes of its reservations, and why."""

    release: bool = False
    """Give back what it has borrowed, and move what it lends. If not, both stay until they end."""
    reason: Reason = ""


class Revocation(Body, frozen=True):
    """Who is refused from now on, and what became of its reservations."""

    member: Member
    known: bool
    """Whether anybody of that name has been seen before."""
    released: list[str] = msgspec.field(default_factory=list)
    """Reservations that it had asked for."""
    drained: list[str] = msgspec.field(default_factory=list)
    """Reservations on it: moved to other clusters, or released."""
    tokens: list[str] = msgspec.field(default_factory=list)
    """Tokens that this administrator had made: they are gone."""
    let_in: list[str] = msgspec.field(default_factory=list)
    """Members (role/name) that this administrator let in. They stay, and should be looked at."""


class Removal(Body, frozen=True):
    """What is left of who was removed."""

    refused: bool
    """Whether it still has certificates, which are refused."""
    refused_until: Timestamp | None = None
    """When the last of them ends; if empty, they are refused until an administrator accepts it."""
    tokens: list[str] = msgspec.field(default_factory=list)
    let_in: list[str] = msgspec.field(default_factory=list)
    """Both as in a revocation."""


class JoinRequest(Body, frozen=True):
    """What a newcomer sends: to the enrolment listener, and only there."""

    token: Annotated[str, Meta(max_length=200)]
    name: Name
    request: Pem
    role: Name = ""


class Joined(Body, frozen=True):
    """The newcomer is in."""

    certificate: Pem
    authorities: Pem
    port: int
    """Where it calls from now on, on the broker's host."""


class JoinWaits(Body, frozen=True):
    """An administrator has to say yes first: ask the same again until then."""

    standing: str
    key: Pin
    """What the administrator sees of it."""
