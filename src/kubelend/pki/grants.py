"""Signed grants of reservations, which a provider can verify offline.

A grant is a compact JWS (RFC 7515) with an Ed25519 signature (RFC 8037), which every JWT library can
verify: `sub` may use `resources` of `aud` for the reservation `jti` until `exp`. The public keys are a JWK
set.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kubelend.core.errors import InvalidGrant, InvalidSettings
from kubelend.kits import keyfiles
from kubelend.pki import files

GRANT_TYPE = "kubelend-grant+jws"
GRANT_ISSUER = "kubelend"
MAX_GRANT_LENGTH = 16 * 1024

_PEM_END = b"-----END PRIVATE KEY-----"


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


LEEWAY = 60
"""Allowed clock skew of a provider in seconds."""


class Jwk(msgspec.Struct, frozen=True):
    """An Ed25519 public key as a JWK."""

    kid: str
    x: str
    kty: str = "OKP"
    crv: str = "Ed25519"
    alg: str = "EdDSA"
    use: str = "sig"


class JwkSet(msgspec.Struct, frozen=True):
    """A JWK set, as served and stored."""

    keys: list[Jwk]


class GrantKeys:
    """The broker's signing keys: the first signs; the others only verify."""

    def __init__(self, keys: Sequence[Ed25519PrivateKey]) -> None:
        self._signer = keys[0]
        self.public = JwkSet([_to_jwk(key.public_key()) for key in keys])
        header = {"alg": "EdDSA", "kid": self.public.keys[0].kid, "typ": GRANT_TYPE}
        self._header = _base64url_encode(msgspec.json.encode(header))

    @classmethod
    def create(cls) -> Self:
        """Create a key in memory."""
        return cls([Ed25519PrivateKey.generate()])

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the keys of a PEM file. A file that other users can access is rejected."""
        if problem := keyfiles.mode_problem(path):
            raise InvalidSettings(problem, hint=f"chmod 600 {path}; consider the key compromised")
        blocks = keyfiles.read_file(path).split(_PEM_END)
        return cls(
            [_private_key_from_pem(block + _PEM_END, path) for block in blocks[:-1]]
            or [_no_key(path)]
        )

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Load the keys of a PEM file; create the file with a new key if it does not exist."""
        if not path.exists():
            files.make_private_directory(path.parent)
            key = Ed25519PrivateKey.generate()
            keyfiles.write_atomic(path, _private_key_to_pem(key), mode=keyfiles.PRIVATE_MODE)
        return cls.load(path)

    def sign(self, grant: Grant) -> str:
        """Sign a grant. Releases the GIL while it signs."""
        signed = self._header + b"." + _base64url_encode(msgspec.json.encode(grant))
        return (signed + b"." + _base64url_encode(self._signer.sign(signed))).decode()


def verify_grant(text: str, keys: Iterable[Jwk]) -> Grant:
    """Verify the signature of a grant and return its claims; `Grant.check` checks provider and times."""
    if len(text) > MAX_GRANT_LENGTH:
        raise InvalidGrant(f"grant exceeds {MAX_GRANT_LENGTH} characters")
    try:
        signed, _, signature = text.strip().encode("ascii").rpartition(b".")
        header, _, claims = signed.partition(b".")
        _verification_key(header, keys).verify(_base64url_decode(signature), signed)
        return msgspec.json.decode(_base64url_decode(claims), type=Grant)
    except InvalidSignature:
        raise InvalidGrant("grant has an invalid signature") from None
    except ValueError:  # not ASCII, base64 or JSON, or other claims
        raise InvalidGrant(
            "not a valid grant", hint="provide the complete grant: three parts separated by dots"
        ) from None


class _Header(msgspec.Struct, frozen=True):
    kid: str
    alg: str
    typ: str


def _verification_key(header: bytes, keys: Iterable[Jwk]) -> Ed25519PublicKey:
    """Return the key by its ID. The algorithm is fixed, because the header must not choose how it is
    verified.
    """
    named = msgspec.json.decode(_base64url_decode(header), type=_Header)
    key = next((key for key in keys if key.kid == named.kid), None)
    if key is None or (named.alg, named.typ) != ("EdDSA", GRANT_TYPE):
        raise InvalidGrant(
            "grant is not signed by a key of this broker", hint="fetch the broker's keys again"
        )
    return Ed25519PublicKey.from_public_bytes(_base64url_decode(key.x))


def _to_jwk(key: Ed25519PublicKey) -> Jwk:
    """Convert to a JWK. `kid` is the key's thumbprint (RFC 7638)."""
    x = _base64url_encode(key.public_bytes_raw()).decode()
    canonical = b'{"crv":"Ed25519","kty":"OKP","x":"%s"}' % x.encode()
    return Jwk(_base64url_encode(hashlib.sha256(canonical).digest()).decode(), x)


def _private_key_from_pem(pem: bytes, path: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(pem.strip(), password=None)
    except (ValueError, TypeError) as error:
        raise InvalidSettings(f"{path} contains no unencrypted private key in PEM form") from error
    return key if isinstance(key, Ed25519PrivateKey) else _no_key(path)


def _no_key(path: Path) -> Ed25519PrivateKey:
    raise InvalidSettings(
        f"{path} contains no Ed25519 key", hint="create one: openssl genpkey -algorithm ed25519"
    )


def _private_key_to_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _base64url_encode(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def _base64url_decode(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True)
