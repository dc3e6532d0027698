"""Contents of certificate and authority directories, for `kubelend certificate show` and `kubelend ca
show`.

No passphrase is needed; without it only the owner of an encrypted key is unknown.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kubelend.kits import files
from kubelend.pki import files as pki_files
from kubelend.pki import identity, keys, tokens
from kubelend.pki import x509 as pki_x509
from kubelend.pki.authority import Authority
from kubelend.pki.passphrases import Passphrase


class AuthorityInfo(msgspec.Struct, frozen=True, rename="camel"):
    """An authority that clients trust. Field names are API."""

    subject: str
    pin: str
    not_before: datetime
    not_after: datetime
    signs: bool | None
    """Whether it is the issuing authority; None if that needs the passphrase."""


class AuthorityDirectoryInfo(msgspec.Struct, frozen=True, rename="camel"):
    """An authority's directory. Field names are API."""

    directory: str
    key_encrypted: bool
    rotating: bool
    """Whether a rotation is in progress, until `kubelend ca rotate --finish`."""

    authorities: list[AuthorityInfo]


def inspect_authority(
    directory: Path, passphrase: Passphrase | None = None
) -> AuthorityDirectoryInfo:
    """Inspect an authority's directory. An unusable authority is an error, as when issuing."""
    path = directory / pki_files.layout_of(directory).key
    encrypted = keys.is_encrypted(files.read_file(path, hint=pki_files.NO_AUTHORITY_HINT))
    if encrypted and passphrase is None:
        return _inspect_without_key(directory)
    authority = Authority.load(directory, passphrase)
    authorities = [
        _authority_info(each, each == authority.certificate) for each in authority.trusted
    ]
    return AuthorityDirectoryInfo(str(directory), encrypted, authority.is_rotating, authorities)


def _inspect_without_key(directory: Path) -> AuthorityDirectoryInfo:
    trusted, cross = pki_files.load_trusted(directory), pki_files.load_cross(directory)
    rotating = any(pki_x509.have_same_key(one, other) for one in cross for other in trusted)
    # A single authority must be the issuing one.
    signs = True if len(trusted) == 1 else None
    return AuthorityDirectoryInfo(
        str(directory), True, rotating, [_authority_info(each, signs) for each in trusted]
    )


def _authority_info(certificate: x509.Certificate, signs: bool | None) -> AuthorityInfo:
    return AuthorityInfo(
        subject=certificate.subject.rfc4514_string(),
        pin=tokens.ca_pin(certificate),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        signs=signs,
    )


class TrustedAuthority(msgspec.Struct, frozen=True, rename="camel"):
    """An authority that verifies peers. Field names are API."""

    subject: str
    pin: str
    not_after: datetime


class CertificateInfo(msgspec.Struct, frozen=True, rename="camel"):
    """A certificate and its directory. Field names are API."""

    directory: str
    name: str
    role: str
    subject: str
    serial: str
    issuer: str
    not_before: datetime
    not_after: datetime
    renew_at: datetime
    authorities: list[TrustedAuthority]


def inspect_certificate(directory: Path) -> CertificateInfo:
    """Inspect a certificate directory. A certificate and key that do not match are an error."""
    found = pki_files.load_credentials(directory)
    own = found.certificate
    return CertificateInfo(
        directory=str(directory),
        name=identity.caller_from_certificate(own).name,
        role=_certificate_role(own),
        subject=own.subject.rfc4514_string(),
        serial=f"{own.serial_number:x}",
        issuer=own.issuer.rfc4514_string(),
        not_before=own.not_valid_before_utc,
        not_after=own.not_valid_after_utc,
        renew_at=pki_x509.renewal_time(own).replace(microsecond=0),
        authorities=[
            TrustedAuthority(
                each.subject.rfc4514_string(), tokens.ca_pin(each), each.not_valid_after_utc
            )
            for each in found.authorities
        ],
    )


def _certificate_role(certificate: x509.Certificate) -> str:
    """Role of the certificate's holder; `broker` for a server certificate."""
    usage = pki_x509.find_extension(certificate, x509.ExtendedKeyUsage)
    if usage is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        return "broker"
    return str(identity.caller_from_certificate(certificate).role)
