"""Grants as compact JWS: their claims, and what can be read of them without a key.

A grant is read and compared here, and verified in `pki.grants`: an agent, which has to read grants, does not
load `cryptography`.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from kubelend.core.errors import InvalidGrant

GRANT_TYPE: Final = "kubelend-grant+jws"
GRANT_ISSUER: Final = "kubelend"
MAX_GRANT_LENGTH: Final = 16 * 1024
LEEWAY: Final = 60
"""Allowed clock skew of a provider in seconds."""


class Grant(msgspec.Struct, frozen=True, omit_defaults=True):
    """Claims of a grant. Times are in seconds since 1970."""

    iss: str
    jti: str
    """ID of the reservation."""
    sub: str
    """ID of the requester cluster."""
    aud: str
    """ID of the provider cluster."""
    nbf: int
    exp: int
    resources: dict[str, str]

    def check(self, *, provider: str, now: datetime) -> None:
        """Raise `InvalidGrant` if the grant is for another provider, expired or not yet valid."""
        if self.aud != provider:
            raise InvalidGrant(f"grant is for provider {self.aud!r}, not {provider!r}")
        if now.timestamp() >= self.exp:
            raise InvalidGrant(f"grant of {self.jti} has expired")
        if now.timestamp() < self.nbf - LEEWAY:
            raise InvalidGrant(f"grant of {self.jti} is not valid yet")


class GrantHeader(msgspec.Struct, frozen=True):
    """Header of a grant; `kid` is the ID of the key that has signed it."""

    kid: str
    alg: str
    typ: str


class GrantText(NamedTuple):
    """The parts of a grant, of which nothing is verified."""

    header: GrantHeader
    claims: bytes
    """Encoded as base64url."""
    signed: bytes
    signature: bytes

    def decode_claims(self) -> Grant:
        return msgspec.json.decode(base64url_decode(self.claims), type=Grant)


def parse_grant(text: str) -> GrantText:
    """Splits a grant; `InvalidGrant` if it is not one. The claims are decoded by `decode_claims`."""
    if len(text) > MAX_GRANT_LENGTH:
        raise InvalidGrant(f"grant exceeds {MAX_GRANT_LENGTH} characters")
    try:
        signed, _, signature = text.strip().encode("ascii").rpartition(b".")
        header, _, claims = signed.partition(b".")
        named = msgspec.json.decode(base64url_decode(header), type=GrantHeader)
        return GrantText(named, claims, signed, base64url_decode(signature))
    except ValueError:  # not ASCII, base64 or JSON, or another header
        raise malformed_grant() from None


def malformed_grant() -> InvalidGrant:
    return InvalidGrant(
        "not a valid grant", hint="provide the complete grant: three parts separated by dots"
    )


def base64url_encode(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def base64url_decode(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True)
