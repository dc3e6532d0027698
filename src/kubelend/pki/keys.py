"""Private keys: generate, encode and decode."""

from __future__ import annotations

import enum

from cryptography import exceptions
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from kubelend.pki.passphrases import Passphrase

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


class Algorithm(enum.StrEnum):
    """Algorithm of a new key. Existing authorities may use others."""

    P256 = "p256"  # small and fast, supported by every TLS library
    RSA = "rsa"  # for peers or policies that require it; 3072 bits are as strong as P-256


def generate(algorithm: Algorithm) -> PrivateKey:
    if algorithm is Algorithm.RSA:
        return rsa.generate_private_key(public_exponent=65537, key_size=3072)
    return ec.generate_private_key(ec.SECP256R1())


def algorithm_of_successor(key: PrivateKey) -> Algorithm:
    """Return the algorithm for a successor of `key`: RSA stays RSA, all others become P-256."""
    return Algorithm.RSA if isinstance(key, rsa.RSAPrivateKey) else Algorithm.P256


def to_pem(key: PrivateKey, passphrase: Passphrase | None = None) -> bytes:
    """Encode as PKCS#8 PEM. Without a passphrase only the file mode protects the key."""
    encryption = (
        serialization.BestAvailableEncryption(passphrase.reveal())
        if passphrase
        else serialization.NoEncryption()
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def from_pem(text: bytes, passphrase: Passphrase | None = None) -> PrivateKey:
    """Decode a PEM key. ValueError has a message for the user."""
    encrypted = is_encrypted(text)
    if encrypted != (passphrase is not None):
        raise ValueError(
            "key is encrypted, but there is no passphrase"
            if encrypted
            else "key is not encrypted, but there is a passphrase"
        )
    try:
        key = serialization.load_pem_private_key(
            text, password=passphrase.reveal() if passphrase else None
        )
    except (TypeError, ValueError, exceptions.UnsupportedAlgorithm) as error:
        raise ValueError(
            "passphrase is wrong, or the key is corrupt"
            if encrypted
            else "not a private key in PEM form"
        ) from error
    if not isinstance(key, PrivateKey):
        raise ValueError("key algorithm must be ECDSA, RSA or Ed25519")
    return key


def is_encrypted(text: bytes) -> bool:
    """Whether a PEM key is encrypted: PKCS#8 has it in its label, older formats in a header."""
    return b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in text or b"Proc-Type: 4,ENCRYPTED" in text


def digest_for(key: PrivateKey) -> hashes.SHA256 | None:
    """Return the digest for signatures with `key`; Ed25519 has its own."""
    return None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
