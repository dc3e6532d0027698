"""Pins: the hash by which a newcomer knows the authority that it is about to trust.

It is of the public key (SubjectPublicKeyInfo), as kubeadm has it, so it stays when the authority's
certificate is renewed with the same key. Not a secret: it is pasted and printed.
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

_PIN = re.compile(r"sha256:[0-9a-f]{64}")


def pin(certificate: x509.Certificate) -> Pin:
    """`sha256:` and the hash of the certificate's public key, in hex."""
    return of_key(certificate.public_key())


def of_key(key: CertificatePublicKeyTypes) -> Pin:
    """The same of a key that has no certificate yet."""
    info = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return Pin(f"sha256:{hashlib.sha256(info).hexdigest()}")


def parse(text: str) -> Pin:
    """The pin that somebody typed or pasted."""
    cleaned = text.strip().lower()
    if not _PIN.fullmatch(cleaned):
        raise InvalidInput(
            "the authority's hash is not sha256: and 64 hex digits",
            hint="copy it from `kubelend ca show` or `kubelend create token`",
        )
    return Pin(cleaned)


def matches(certificate: x509.Certificate, wanted: Pin) -> bool:
    """Whether the certificate is for the pinned key."""
    return pin(certificate) == wanted


def pinned(certificates: Iterable[x509.Certificate], wanted: Pin) -> tuple[x509.Certificate, ...]:
    """Those for the pinned key. Only these may be trusted: the rest came from anybody."""
    return tuple(each for each in certificates if matches(each, wanted))
