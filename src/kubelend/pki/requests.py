"""Certificate signing requests (PKCS#10): created by clients, checked by the broker; certificate renewal.

A CSR proves possession of the key, and claims a name and a role. Nothing else of it is read: the broker
decides on name and role, and the profile defines the certificate. `check_csr` accepts any input and raises
only `InvalidInput`.
"""

from __future__ import annotations

import re
import warnings

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from kubelend.core.errors import InvalidIdentity, InvalidInput
from kubelend.core.roles import Role
from kubelend.pki import identities, keys, profiles
from kubelend.pki.identities import Caller
from kubelend.pki.keys import PrivateKey, PublicKey

MAX_CSR_LENGTH = 16 * 1024
"""Maximum size in bytes; an RSA key of 8192 bits needs about 3,000."""

_CURVES = (ec.SECP256R1, ec.SECP384R1)
_RSA_BITS = range(2048, 8192 + 1)
# Smaller exponents allow known attacks, and Go does not support larger ones.
_RSA_EXPONENTS = range(65537, 2**31)
_DIGESTS = (hashes.SHA256, hashes.SHA384, hashes.SHA512)

_ONE_BLOCK = re.compile(
    rb"\s*-----BEGIN (NEW )?CERTIFICATE REQUEST-----\s[A-Za-z0-9+/=\s]+"
    rb"-----END (NEW )?CERTIFICATE REQUEST-----\s*"
)
_ATTRIBUTES = {NameOID.COMMON_NAME: "commonName", NameOID.ORGANIZATION_NAME: "organizationName"}


class VerifiedCsr(msgspec.Struct, frozen=True):
    """A CSR with a valid signature."""

    public_key: PublicKey
    claims: Caller
    """Claimed identity. Not proven by the CSR, but by the token or the old certificate."""


def make_csr(name: str, role: Role, key: PrivateKey) -> str:
    """Create a CSR in PEM form, signed with the key."""
    builder = x509.CertificateSigningRequestBuilder(profiles.client_profile(name, role).subject)
    request = builder.sign(key, keys.digest_for(key))
    return request.public_bytes(serialization.Encoding.PEM).decode()


def check_csr(pem: bytes | str) -> VerifiedCsr:
    """Parse and validate an untrusted CSR."""
    request = _parse_csr(_single_pem_block(pem))
    # The key size first, because verifying a signature with a huge key is expensive.
    public_key = _csr_public_key(request)
    _check_signature(request)
    return VerifiedCsr(public_key, _claimed_identity(request))


def _single_pem_block(pem: bytes | str) -> bytes:
    if len(pem) > MAX_CSR_LENGTH:
        raise InvalidInput(f"certificate request exceeds {MAX_CSR_LENGTH} bytes")
    text = pem.encode(errors="replace") if isinstance(pem, str) else pem
    if text.count(b"-----BEGIN ") > 1:
        raise InvalidInput(
            "more than one PEM block in the certificate request", hint="send one PEM block"
        )
    if not _ONE_BLOCK.fullmatch(text):
        raise InvalidInput(
            "not a certificate request in PEM form",
            hint="send text from -----BEGIN CERTIFICATE REQUEST----- to its END",
        )
    return text


def _parse_csr(text: bytes) -> x509.CertificateSigningRequest:
    try:
        return x509.load_pem_x509_csr(text)
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise InvalidInput("certificate request is corrupt") from error


def _csr_public_key(request: x509.CertificateSigningRequest) -> PublicKey:
    try:
        key = request.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInput("key in the certificate request cannot be decoded") from error
    if isinstance(key, rsa.RSAPublicKey):
        _check_rsa_key(key)
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES):
        return key
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    raise InvalidInput(
        "key type of the certificate request is not supported",
        hint="use ECDSA with P-256 or P-384, RSA or Ed25519",
    )


def _check_rsa_key(key: rsa.RSAPublicKey) -> None:
    if key.key_size not in _RSA_BITS:
        raise InvalidInput(
            f"certificate request has an RSA key of {key.key_size} bits",
            hint=f"use {_RSA_BITS[0]} to {_RSA_BITS[-1]} bits",
        )
    exponent = key.public_numbers().e
    if exponent not in _RSA_EXPONENTS or exponent % 2 == 0:
        raise InvalidInput(
            "RSA key in the certificate request has an unsafe exponent", hint="use 65537"
        )


def _check_signature(request: x509.CertificateSigningRequest) -> None:
    try:
        digest = request.signature_hash_algorithm
        valid = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput("signature of the certificate request cannot be decoded") from error
    # Ed25519 has its own digest and returns None.
    if digest is not None and not isinstance(digest, _DIGESTS):
        raise InvalidInput(
            f"certificate request is signed with {digest.name}", hint="use sha256 or stronger"
        )
    if not valid:
        raise InvalidInput("certificate request is not signed by its own key")


def _claimed_identity(request: x509.CertificateSigningRequest) -> Caller:
    try:
        # The library warns about lengths on stderr, which a client must not be able to cause.
        with warnings.catch_warnings(action="ignore"):
            subject = list(request.subject)
    except (ValueError, TypeError) as error:
        raise InvalidInput("subject of the certificate request cannot be decoded") from error
    attributes = [
        (_ATTRIBUTES[each.oid], _attribute_text(each.value))
        for each in subject
        if each.oid in _ATTRIBUTES
    ]
    try:
        return identities.caller_from_subject(attributes)
    except InvalidIdentity as error:
        raise InvalidIdentity(f"certificate request: {error.message}") from None


def _attribute_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
