"""Contents of a certificate directory, for `kubelend certificate show`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kubelend.pki import certificates, files, identities, lifetimes, pins


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
    found = files.load_credentials(directory)
    own = found.certificate
    return CertificateInfo(
        directory=str(directory),
        name=identities.caller_from_certificate(own).name,
        role=_certificate_role(own),
        subject=own.subject.rfc4514_string(),
        serial=f"{own.serial_number:x}",
        issuer=own.issuer.rfc4514_string(),
        not_before=own.not_valid_before_utc,
        not_after=own.not_valid_after_utc,
        renew_at=lifetimes.renewal_time(own).replace(microsecond=0),
        authorities=[
            TrustedAuthority(
                each.subject.rfc4514_string(), pins.ca_pin(each), each.not_valid_after_utc
            )
            for each in found.authorities
        ],
    )


def _certificate_role(certificate: x509.Certificate) -> str:
    """Role of the certificate's holder; `broker` for a server certificate."""
    usage = certificates.find_extension(certificate, x509.ExtendedKeyUsage)
    if usage is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        return "broker"
    return str(identities.caller_from_certificate(certificate).role)
