"""Pins of certificate authorities: SHA-256 of the public key (SubjectPublicKeyInfo), as in kubeadm.

A pin authenticates the broker to a client that joins. It stays the same when the certificate is renewed
with the same key, and is not secret.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NewType

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

from kubelend.core.errors import InvalidInput

Pin = NewType("Pin", str)

_PIN_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")


def ca_pin(certificate: x509.Certificate) -> Pin:
    """Return the pin of a certificate's key."""
    return pin_of_key(certificate.public_key())


def pin_of_key(key: CertificatePublicKeyTypes) -> Pin:
    """Return the pin of a public key."""
    info = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return Pin(f"sha256:{hashlib.sha256(info).hexdigest()}")


def parse_ca_pin(text: str) -> Pin:
    """Parse a pin that a user entered."""
    cleaned = text.strip().lower()
    if not _PIN_PATTERN.fullmatch(cleaned):
        raise InvalidInput(
            "CA hash must be sha256: followed by 64 hex digits",
            hint="copy it from `kubelend ca show` or `kubelend create token`",
        )
    return Pin(cleaned)


def matches_pin(certificate: x509.Certificate, wanted: Pin) -> bool:
    """Whether the certificate has the pinned key."""
    return ca_pin(certificate) == wanted


def pinned_certificates(
    certificates: Iterable[x509.Certificate], wanted: Pin
) -> tuple[x509.Certificate, ...]:
    """Return the certificates with the pinned key. The others come from an unauthenticated peer."""
    return tuple(each for each in certificates if matches_pin(each, wanted))
