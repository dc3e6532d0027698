"""Join tokens `kl1.<id>.<secret>`, and pins of the broker's authority.

The ID is public: tokens are listed, logged and deleted by it. Only the SHA-256 of the secret is stored; a
plain hash is sufficient, because the secret has 160 random bits.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Iterable
from typing import NamedTuple, NewType

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

from kubelend.core.errors import InvalidInput

TOKEN_VERSION = "kl1"  # noqa: S105 - a format version

_ID_LENGTH = 10
_SECRET_LENGTH = 32
_TOKEN_PATTERN = re.compile(
    rf"{TOKEN_VERSION}\.([a-z2-7]{{{_ID_LENGTH}}})\.([a-z2-7]{{{_SECRET_LENGTH}}})"
)
_MAX_TOKEN_LENGTH = 200


class GeneratedToken(NamedTuple):
    """A new token. Its text is returned once and not stored."""

    text: str
    id: str
    digest: str

    def __repr__(self) -> str:
        return f"NewToken({TOKEN_VERSION}.{self.id}....)"


class TokenParts(NamedTuple):
    """ID and secret of a token."""

    id: str
    secret: str

    def __repr__(self) -> str:
        return f"Parts({self.id}, ...)"


def new_token() -> GeneratedToken:
    name, secret = _random_base32(_ID_LENGTH), _random_base32(_SECRET_LENGTH)
    return GeneratedToken(f"{TOKEN_VERSION}.{name}.{secret}", name, secret_digest(secret))


def parse_token(text: str) -> TokenParts:
    """Parse the text of a token. Errors do not repeat any of it."""
    text = text.strip() if len(text) <= _MAX_TOKEN_LENGTH else ""
    match = _TOKEN_PATTERN.fullmatch(text)
    if match is None:
        raise InvalidInput(
            f"not a valid token: expected {TOKEN_VERSION}.ID.SECRET,"
            f" with {_ID_LENGTH} and {_SECRET_LENGTH} letters or digits",
            hint="copy the complete output of `kubelend create token`",
        )
    return TokenParts(match[1], match[2])


def secret_digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _random_base32(length: int) -> str:
    # Base32 makes 8 letters of 5 bytes; lower case reads and pastes better.
    text = base64.b32encode(secrets.token_bytes(-(-length * 5 // 8)))
    return text.decode().lower()[:length]


Pin = NewType("Pin", str)

_PIN_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")


def ca_pin(certificate: x509.Certificate) -> Pin:
    return pin_of_key(certificate.public_key())


def pin_of_key(key: CertificatePublicKeyTypes) -> Pin:
    info = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return Pin(f"sha256:{hashlib.sha256(info).hexdigest()}")


def bundle_digest(certificates: Iterable[x509.Certificate]) -> str:
    """Return a digest of a set of authorities, in any order."""
    return hashlib.sha256(" ".join(sorted(map(ca_pin, certificates))).encode()).hexdigest()


def parse_ca_pin(text: str) -> Pin:
    """Parse a pin that a user entered."""
    cleaned = text.strip().lower()
    if not _PIN_PATTERN.fullmatch(cleaned):
        raise InvalidInput(
            "CA hash must be sha256: followed by 64 hex digits",
            hint="copy it from `kubelend ca show` or `kubelend create token`",
        )
    return Pin(cleaned)


def pinned_certificates(
    certificates: Iterable[x509.Certificate], wanted: Pin
) -> tuple[x509.Certificate, ...]:
    """Return the certificates with the pinned key. The others come from an unauthenticated peer."""
    return tuple(each for each in certificates if ca_pin(each) == wanted)
