"""Records of members and join tokens.

A certificate is accepted without a member record if another trusted CA has issued it. But a record
decides: a Pending member has no access, a Revoked one has lost it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType, Self

from msgspec.structs import replace

from kubelend.core.lifecycle import Role
from kubelend.core.models import Record

MemberId = NewType("MemberId", str)
TokenId = NewType("TokenId", str)

BY_CERTIFICATE = "its older certificate"
"""`decided_by` of a member that renewed a certificate from another CA: nobody approved it."""


class MembershipStatus(StrEnum):
    """Status of a membership. The values are API."""

    PENDING = "Pending"  # waiting for approval by an administrator
    APPROVED = "Approved"  # may obtain certificates
    REVOKED = "Revoked"  # all its certificates are rejected


class Certificate(Record, frozen=True):
    """The latest certificate that the broker issued to a member."""

    serial: str
    issued_at: datetime
    expires_at: datetime
    authority: str
    """The pin of the issuing CA; shows which members have moved to a new CA."""
    bundle: str = ""
    """Digest of the CAs that it was issued with; shows which members trust a new CA."""


class Member(Record, frozen=True):
    """A cluster or user. Role and name identify it, because a cluster may have the name of a user."""

    role: Role
    name: str
    status: MembershipStatus
    requested_at: datetime
    key: str = ""
    """The pin of its public key: a repeated request with the same key is a retry."""
    pending_key: str = ""
    """The pin of another key with a pending join request under this name; empty if none."""
    token: TokenId | None = None
    """The token of its last join request."""
    decided_at: datetime | None = None
    decided_by: str = ""
    certificate: Certificate | None = None
    certified_until: datetime | None = None
    """Expiry of its longest-lived certificate, which may not be the latest."""
    revoked_at: datetime | None = None
    """Certificates issued before this time stay rejected, even if it is accepted again."""
    reason: str = ""
    """Reason of the revocation."""
    forget_at: datetime | None = None
    """When a removed member is deleted: it stays revoked until its last certificate expires."""
    revision: int = 0

    @property
    def id(self) -> MemberId:
        return member_id(self.role, self.name)

    @property
    def was_admitted(self) -> bool:
        """Whether an administrator approved it, by a token or by name."""
        return self.status is MembershipStatus.APPROVED and self.decided_by != BY_CERTIFICATE

    def with_certificate(
        self, certificate: Certificate, shown_until: datetime | None = None
    ) -> Self:
        """Returns the record with a new certificate; the one presented for it may expire later."""
        ends = (self.certified_until, certificate.expires_at, shown_until)
        until = max(end for end in ends if end is not None)
        return replace(self, certificate=certificate, certified_until=until)

    def as_revoked(self, reason: str, by: str, now: datetime) -> Self:
        """Returns the record with all its certificates revoked."""
        revoked_at = now
        if self.certificate is not None and self.revoked_at is not None:
            # After a re-acceptance certificates start at the next whole second.
            revoked_at = max(now, self.certificate.issued_at + timedelta(seconds=1))
        return replace(
            self,
            status=MembershipStatus.REVOKED,
            pending_key="",
            revoked_at=revoked_at,
            decided_at=now,
            decided_by=by,
            reason=reason,
            forget_at=None,
        )

    def is_approved_with_key(self, key: str) -> bool:
        """Whether the holder of this key may obtain certificates under its name."""
        return self.status is MembershipStatus.APPROVED and self.key == key


class Token(Record, frozen=True):
    """A permission to join. The secret itself is not stored."""

    id: TokenId
    digest: str
    """SHA-256 of the secret, in hexadecimal digits."""
    role: Role
    created_at: datetime
    created_by: str
    expires_at: datetime
    uses_left: int = 1
    name: str = ""
    """The only name that may join with it; any if empty."""
    revision: int = 0


def member_id(role: Role, name: str) -> MemberId:
    return MemberId(f"{role}/{name}")
