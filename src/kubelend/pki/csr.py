"""Certificate signing requests (PKCS#10): created by clients, checked by the broker; certificate renewal.

A CSR proves possession of the key, and claims a name and a role. Nothing else of it is read: the broker
decides on name and role, and the profile defines the certificate. `check_csr` accepts any input and raises
only `InvalidInput`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from datetime import datetime

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from kubelend.core.errors import InvalidIdentity, InvalidInput, UnexpectedResponse
from kubelend.core.lifecycle import Role
from kubelend.kits import files
from kubelend.pki import files as pki_files
from kubelend.pki import identity, keys
from kubelend.pki import x509 as pki_x509
from kubelend.pki.files import Credentials
from kubelend.pki.identity import Caller
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


class VerifiedCsr(msgspec.Struct, frozen=True):
    """A CSR with a valid signature."""

    public_key: PublicKey
    claims: Caller
    """Claimed identity. Not proven by the CSR, but by the token or the old certificate."""


def make_csr(name: str, role: Role, key: PrivateKey) -> str:
    """Create a CSR in PEM form, signed with the key."""
    builder = x509.CertificateSigningRequestBuilder(identity.client_profile(name, role).subject)
    request = builder.sign(key, keys.digest_for(key))
    return request.public_bytes(serialization.Encoding.PEM).decode()


def check_csr(pem: bytes | str) -> VerifiedCsr:
    """Parse and validate an untrusted CSR."""
    text = _single_pem_block(pem)
    try:
        request = x509.load_pem_x509_csr(text)
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise InvalidInput("certificate request is corrupt") from error
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
    try:
        return identity.caller_from_subject(identity.subject_attributes(subject))
    except InvalidIdentity as error:
        raise InvalidIdentity(f"certificate request: {error.message}") from None


def begin_renewal(old: Credentials) -> tuple[PrivateKey, str]:
    """Create a new key of the same algorithm, and its certificate signing request (PEM).

    The key is not written before its certificate is issued.
    """
    key = keys.generate(keys.algorithm_of_successor(old.key))
    holder = identity.caller_from_certificate(old.certificate)
    return key, make_csr(holder.name, holder.role, key)


def verify_issued(
    key: PrivateKey, requested: Caller, certificate: str, authorities: str, now: datetime
) -> Credentials:
    """Verify a certificate issued for `key`; `UnexpectedResponse` if it is not what was requested.

    The authorities are trusted as they are: by a renewal because the old ones verified the connection, by
    `kubelend.apps.join` because it has checked their pin.
    """
    own, *chain = _parse_certificates(certificate)
    trusted = tuple(_parse_certificates(authorities))
    if not pki_files.is_certificate_of(own, key):
        raise UnexpectedResponse("issued certificate is for another key")
    issued = identity.caller_from_certificate(own)
    if requested != issued:
        raise UnexpectedResponse(
            f"issued certificate is for {issued.role} {issued.name},"
            f" not for {requested.role} {requested.name}"
        )
    if own.not_valid_after_utc <= now:
        raise UnexpectedResponse("issued certificate has already expired")
    if not _is_trusted_chain(own, chain, trusted):
        raise UnexpectedResponse(
            "issued certificate is not signed by any of the broker's authorities"
        )
    return Credentials(own, key, trusted, tuple(chain))


def credential_files(credentials: Credentials) -> dict[str, bytes]:
    """Return the contents of the three files by name."""
    return {
        files.TLS_KEY: keys.to_pem(credentials.key),
        files.TLS_CERTIFICATE: pki_files.to_pem([credentials.certificate, *credentials.chain]),
        files.CA_CERTIFICATES: pki_files.to_pem(credentials.authorities),
    }


def _parse_certificates(text: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        raise UnexpectedResponse(
            "response of the broker contains no certificate in PEM form"
        ) from error


def _is_trusted_chain(
    certificate: x509.Certificate,
    chain: Iterable[x509.Certificate],
    trusted: Iterable[x509.Certificate],
) -> bool:
    """Whether each certificate of the chain signed the previous one, up to a trusted one."""
    for link in (certificate, *chain):
        if link is not certificate and not pki_x509.is_issued_by(certificate, link):
            return False
        if any(pki_x509.is_issued_by(link, each) for each in trusted):
            return True
        certificate = link
    return False
