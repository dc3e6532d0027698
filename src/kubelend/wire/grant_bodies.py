"""The bodies of the routes about signed grants: the grant itself, and the keys to check it with."""

from __future__ import annotations

from kubelend.wire.bodies import Body


class SignedGrant(Body, frozen=True):
    """A live reservation, signed by the broker: a compact JWS (EdDSA); the keys are at /api/v1/keys."""

    grant: str


class PublicKey(Body, frozen=True):
    """An Ed25519 key as a JWK (RFC 8037)."""

    kid: str
    x: str
    kty: str
    crv: str
    alg: str
    use: str


class KeySet(Body, frozen=True):
    """A JWK set (RFC 7517). The first key signs, older ones may have."""

    keys: list[PublicKey]
