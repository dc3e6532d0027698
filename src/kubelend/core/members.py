"""Who belongs: the records of those that joined, and of the tokens that let them.

A member need not exist for a certificate to be believed: an authority that the broker trusts may have
issued it elsewhere. But what is written here decides: who waits is not in yet, who is revoked is out.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType, Self

from msgspec.structs import replace

from kubelend.core.models import Record
from kubelend.core.roles import Role

MemberId = NewType("MemberId", str)
TokenId = NewType("TokenId", str)

BY_CERTIFICATE = "its older certificate"
"""What decided on a member that nobody let in: it showed a certificate from elsewhere, and renewed it."""


class Standing(StrEnum):
    """Where a member stands. The values are API."""

    PENDING = "Pending"  # it asked to join, and an administrator has to say yes
    ACCEPTED = "Accepted"  # it may have certificates
    REVOKED = "Revoked"  # none of the certificates it has is believed


class Certificate(Record, frozen=True):
    """The newest certificate that the broker issued to a member: what tells it from others."""

    serial: str
    issued_at: datetime
    ends_at: datetime
    authority: str
    """The pin of the authority that signed it: who has moved to a new one, and who has not."""


class Member(Record, frozen=True):
    """A cluster or a person by role and name, for a cluster may have the name of a person."""

    role: Role
    name: str
    standing: Standing
    asked_at: datetime
    key: str = ""
    """The pin of its public key: whoever asks again with the same one has only lost the answer."""
    asks: str = ""
    """The pin of another key that asks to join in this name, and waits; empty if none does."""
    token: TokenId | None = None
    """With which it last asked."""
    decided_at: datetime | None = None
    decided_by: str = ""
    certificate: Certificate | None = None
    certified_until: datetime | None = None
    """When the last of its certificates ends, which need not be the newest."""
    revoked_at: datetime | None = None
    """Certificates from before this moment stay refused, also after a later return."""
    reason: str = ""
    """Why it was revoked."""
    forget_at: datetime | None = None
    """It was removed, and is revoked until its last certificate has ended: then the record goes."""
    revision: int = 0

    @property
    def id(self) -> MemberId:
        return member_id(self.role, self.name)

    @property
    def was_let_in(self) -> bool:
        """Whether an administrator said yes to it, by a token or by name."""
        return self.standing is Standing.ACCEPTED and self.decided_by != BY_CERTIFICATE

    def was_let_in_by(self, admin: str) -> bool:
        return self.was_let_in and self.decided_by == admin

    def certified(self, certificate: Certificate, shown_until: datetime | None = None) -> Self:
        """The same with a newer certificate; the one that it showed for it may end later."""
        ends = (self.certified_until, certificate.ends_at, shown_until)
        until = max(end for end in ends if end is not None)
        return replace(self, certificate=certificate, certified_until=until)

    def revoked(self, why: str, by: str, now: datetime) -> Self:
        """The same, with none of its certificates believed any more."""
        return replace(
            self,
            standing=Standing.REVOKED,
            asks="",
            revoked_at=self._after_all_certificates(now),
            decided_at=now,
            decided_by=by,
            reason=why,
            forget_at=None,
        )

    def is_in_with(self, key: str) -> bool:
        """Whether the holder of this key may have certificates in its name."""
        return self.standing is Standing.ACCEPTED and self.key == key

    def _after_all_certificates(self, now: datetime) -> datetime:
        """Now. But after a return, certificates start on the next whole second, and that may be later."""
        if self.certificate is None or self.revoked_at is None:
            return now
        return max(now, self.certificate.issued_at + timedelta(seconds=1))


class Token(Record, frozen=True):
    """A permission to join. The secret itself is nowhere but with those it was given to."""

    id: TokenId
    digest: str
    """SHA-256 of the secret, in hexadecimal digits."""
    role: Role
    created_at: datetime
    created_by: str
    expires_at: datetime
    uses_left: int = 1
    name: str = ""
    """The only name that may join with it; empty for any."""
    revision: int = 0


def member_id(role: Role, name: str) -> MemberId:
    return MemberId(f"{role}/{name}")
