"""Private keys: made, written as text and read back."""

from __future__ import annotations

import enum

from cryptography import exceptions
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from kubelend.pki.passphrases import Passphrase

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


def algorithm_like(key: PrivateKey) -> Algorithm:
    """What a successor of `key` is: whoever needs RSA goes on needing it."""
    return Algorithm.RSA if isinstance(key, rsa.RSAPrivateKey) else Algorithm.P256


def to_pem(key: PrivateKey, passphrase: Passphrase | None = None) -> bytes:
    """PKCS#8 text. Without a passphrase the file's mode is all that protects it."""
    encryption = (
        serialization.BestAvailableEncryption(passphrase.reveal())
        if passphrase
        else serialization.NoEncryption()
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def from_pem(text: bytes, passphrase: Passphrase | None = None) -> PrivateKey:
    """The key in a PEM text. ValueError says why there is none, in words for a person."""
    encrypted = is_encrypted(text)
    if encrypted != (passphrase is not None):
        raise ValueError(
            "it is encrypted, and no passphrase is given"
            if encrypted
            else "it is not encrypted, and a passphrase is given"
        )
    try:
        key = serialization.load_pem_private_key(
            text, password=passphrase.reveal() if passphrase else None
        )
    except (TypeError, ValueError, exceptions.UnsupportedAlgorithm) as error:
        raise ValueError(
            "its passphrase is wrong, or it is damaged"
            if encrypted
            else "it is no private key in PEM form"
        ) from error
    if not isinstance(key, PrivateKey):
        raise ValueError("its algorithm is none of ECDSA, RSA and Ed25519")
    return key


def is_encrypted(text: bytes) -> bool:
    """Whether a PEM text needs a passphrase: PKCS#8 says so in its label, older forms in a header."""
    return b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in text or b"Proc-Type: 4,ENCRYPTED" in text


def digest_for(key: PrivateKey) -> hashes.SHA256 | None:
    """The digest with which `key` signs a certificate; Ed25519 has its own."""
    return None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
