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


class Holding(msgspec.Struct, frozen=True, rename="camel"):
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


def inspect(directory: Path) -> Holding:
    """Inspect a certificate directory. A certificate and key that do not match are an error."""
    found = files.load_credentials(directory)
    own = found.certificate
    return Holding(
        directory=str(directory),
        name=identities.holder(own).name,
        role=_role(own),
        subject=own.subject.rfc4514_string(),
        serial=f"{own.serial_number:x}",
        issuer=own.issuer.rfc4514_string(),
        not_before=own.not_valid_before_utc,
        not_after=own.not_valid_after_utc,
        renew_at=lifetimes.renew_at(own).replace(microsecond=0),
        authorities=[
            TrustedAuthority(
                each.subject.rfc4514_string(), pins.pin(each), each.not_valid_after_utc
            )
            for each in found.authorities
        ],
    )


def _role(certificate: x509.Certificate) -> str:
    """Role of the certificate's holder; `broker` for a server certificate."""
    usage = certificates.extension(certificate, x509.ExtendedKeyUsage)
    if usage is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        return "broker"
    return str(identities.holder(certificate).role)
