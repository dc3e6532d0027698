"""Private keys: made, written as text and read back. Only the authority handles them."""

from __future__ import annotations

import enum

from cryptography import exceptions
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


class Algorithm(enum.StrEnum):
    """What a new key is. Existing authorities may have others; those are read, not made."""

    P256 = "p256"  # small and quick, known to every TLS library
    RSA = "rsa"  # for peers or rules that ask for it; 3072 bits are as strong as P-256


def generate(algorithm: Algorithm) -> PrivateKey:
    """A new key."""
    if algorithm is Algorithm.RSA:
        return rsa.generate_private_key(public_exponent=65537, key_size=3072)
    return ec.generate_private_key(ec.SECP256R1())


def to_pem(key: PrivateKey) -> bytes:
    """PKCS#8 text, not encrypted: the file's mode is what protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def from_pem(text: bytes) -> PrivateKey:
    """The key in a PEM text. ValueError says why there is none, in words for a person."""
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except TypeError as error:
        raise ValueError("it is encrypted, and only plain keys can be read") from error
    except (ValueError, exceptions.UnsupportedAlgorithm) as error:
        raise ValueError("it is no private key in PEM form") from error
    if not isinstance(key, PrivateKey):
        raise ValueError("its algorithm is none of ECDSA, RSA and Ed25519")
    return key


def digest_for(key: PrivateKey) -> hashes.SHA256 | None:
    """The digest with which `key` signs a certificate; Ed25519 has its own."""
    return None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
