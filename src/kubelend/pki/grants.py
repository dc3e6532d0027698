"""Signed grants of reservations, which a provider can verify offline, and their signer.

A grant is a compact JWS (RFC 7515) with an Ed25519 signature (RFC 8037), which every JWT library can
verify: `sub` may use `resources` of `aud` for the reservation `jti` until `exp`. The public keys are a JWK
set.

    python -m kubelend.pki.grants < grant and keys

As a program it verifies one grant for the agent, which does not load `cryptography`.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from kubelend.core import grants
from kubelend.core.errors import InvalidGrant, InvalidSettings
from kubelend.core.grants import GRANT_ISSUER, GRANT_TYPE, Grant, GrantHeader
from kubelend.core.models import ClusterId, Reservation
from kubelend.kits import files
from kubelend.pki import files as pki_files
from kubelend.pki import keys

_PEM_END = b"-----END PRIVATE KEY-----"


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
        self._header = grants.base64url_encode(msgspec.json.encode(header))

    @classmethod
    def create(cls) -> Self:
        return cls([Ed25519PrivateKey.generate()])

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the keys of a PEM file. A file that other users can access is rejected."""
        if problem := files.mode_problem(path):
            raise InvalidSettings(problem, hint=f"chmod 600 {path}; consider the key compromised")
        *blocks, rest = files.read_file(path).split(_PEM_END)
        if blocks and rest.strip():
            raise InvalidSettings(
                f"{path} has text after its last private key",
                hint="remove it, or complete the key that it belongs to",
            )
        keys = [_private_key_from_pem(block + _PEM_END, path) for block in blocks]
        found = [key for key in keys if isinstance(key, Ed25519PrivateKey)]
        if not found or len(found) < len(keys):
            raise InvalidSettings(
                f"{path} contains no Ed25519 key",
                hint="create one: openssl genpkey -algorithm ed25519",
            )
        return cls(found)

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Load the keys of a PEM file; create the file with a new key if it does not exist."""
        if not path.exists():
            pki_files.make_private_directory(path.parent)
            text = keys.to_pem(Ed25519PrivateKey.generate())
            files.write_atomic(path, text, mode=files.PRIVATE_MODE)
        return cls.load(path)

    def sign(self, grant: Grant) -> str:
        """Sign a grant. Releases the GIL while it signs."""
        signed = self._header + b"." + grants.base64url_encode(msgspec.json.encode(grant))
        return (signed + b"." + grants.base64url_encode(self._signer.sign(signed))).decode()


def verify_grant(text: str, keys: Iterable[Jwk]) -> Grant:
    """Verify the signature of a grant and return its claims; `Grant.check` checks provider and times."""
    found = grants.parse_grant(text)
    try:
        _verification_key(found.header, keys).verify(found.signature, found.signed)
        return found.decode_claims()
    except InvalidSignature:
        raise InvalidGrant("grant has an invalid signature") from None
    except ValueError:  # a broken key, or other claims
        raise grants.malformed_grant() from None


def _verification_key(header: GrantHeader, keys: Iterable[Jwk]) -> Ed25519PublicKey:
    """Return the key by its ID. The algorithm is fixed, because the header must not choose how it is
    verified.
    """
    key = next((key for key in keys if key.kid == header.kid), None)
    if key is None or (header.alg, header.typ) != ("EdDSA", GRANT_TYPE):
        raise InvalidGrant(
            "grant is not signed by a key of this broker", hint="fetch the broker's keys again"
        )
    return Ed25519PublicKey.from_public_bytes(grants.base64url_decode(key.x))


def _to_jwk(key: Ed25519PublicKey) -> Jwk:
    """Convert to a JWK. `kid` is the key's thumbprint (RFC 7638)."""
    x = grants.base64url_encode(key.public_bytes_raw()).decode()
    canonical = b'{"crv":"Ed25519","kty":"OKP","x":"%s"}' % x.encode()
    return Jwk(grants.base64url_encode(hashlib.sha256(canonical).digest()).decode(), x)


def _private_key_from_pem(pem: bytes, path: Path) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(pem.strip(), password=None)
    except (ValueError, TypeError) as error:
        raise InvalidSettings(f"{path} contains no unencrypted private key in PEM form") from error


_PendingGrant = tuple[Grant, "asyncio.Future[str]"]


class GrantSigner:
    """Signs grants in a thread; bound to one event loop."""

    def __init__(self, keys: GrantKeys) -> None:
        self._keys = keys
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grants")
        self._pending: list[_PendingGrant] = []

    @property
    def public(self) -> JwkSet:
        return self._keys.public

    async def grant(self, found: Reservation, reader: ClusterId) -> str | None:
        """Returns the grant of a live reservation for its requester or provider; None for others."""
        grant = _grant_claims(found) if reader in (found.requester, found.target) else None
        return None if grant is None else await self._sign_in_batch(grant)

    def close(self) -> None:
        self._thread.shutdown()

    def _sign_in_batch(self, grant: Grant) -> asyncio.Future[str]:
        loop = asyncio.get_running_loop()
        if not self._pending:
            loop.call_soon(self._sign_pending)
        signed = loop.create_future()
        self._pending.append((grant, signed))
        return signed

    def _sign_pending(self) -> None:
        waiting, self._pending = self._pending, []
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(
            self._thread, lambda: [self._keys.sign(grant) for grant, _ in waiting]
        )
        work.add_done_callback(partial(_set_results, waiting))


def _set_results(pending: Sequence[_PendingGrant], work: asyncio.Future[list[str]]) -> None:
    problem = work.exception()
    for index, (_, signed) in enumerate(pending):
        if signed.done():
            continue  # its caller was cancelled
        if problem is None:
            signed.set_result(work.result()[index])
        else:
            signed.set_exception(problem)


def _grant_claims(found: Reservation) -> Grant | None:
    if not found.is_live:
        return None
    if found.target is None or found.reserved_at is None or found.expires_at is None:
        return None
    return Grant(
        iss=GRANT_ISSUER,
        jti=found.id,
        sub=found.requester,
        aud=found.target,
        nbf=int(found.reserved_at.timestamp()),
        exp=int(found.expires_at.timestamp()),
        resources=found.request.resources.quantities(),
    )


class GrantToVerify(msgspec.Struct, frozen=True):
    """Input of the program: a grant and the keys of its broker."""

    grant: str
    keys: list[Jwk]


class VerifiedGrant(msgspec.Struct, frozen=True):
    """Output of the program: whether the signature is valid, and why not."""

    error: str = ""


def _verify_input(content: bytes) -> bytes:
    wanted = msgspec.json.decode(content, type=GrantToVerify)
    try:
        verify_grant(wanted.grant, wanted.keys)
    except InvalidGrant as error:
        return msgspec.json.encode(VerifiedGrant(error.message))
    return msgspec.json.encode(VerifiedGrant())


if __name__ == "__main__":
    sys.stdout.buffer.write(_verify_input(sys.stdin.buffer.read()))
