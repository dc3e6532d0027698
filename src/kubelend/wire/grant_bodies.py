"""Bodies of signed grants and of the keys that verify them."""

from __future__ import annotations

from kubelend.wire.bodies import Body


class SignedGrant(Body, frozen=True):
    """Grant of a live reservation, signed by the broker: a compact JWS (EdDSA). The keys are at
    /api/v1/keys.
    """

    grant: str


class PublicKey(Body, frozen=True):
    """An Ed25519 public key as a JWK (RFC 8037)."""

    kid: str
    x: str
    kty: str
    crv: str
    alg: str
    use: str


class KeySet(Body, frozen=True):
    """A JWK set (RFC 7517). The first key signs; the others verify older grants."""

    keys: list[PublicKey]
