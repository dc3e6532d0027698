"""X.509 helpers: validity periods and renewal times of certificates, and their chains.

A certificate has no issue time, only notBefore, which is backdated because clocks differ. The backdating is
computed from the lifetime so that it can be inverted; where it could not be applied, the lowest bit of the
serial number is set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from kubelend.core.errors import InvalidSettings

CLOCK_SKEW = timedelta(minutes=5)
"""Backdating of certificates, as a peer's clock may be behind."""

MIN_REMAINING, MAX_REMAINING = 0.20, 0.25
"""Bounds of the remaining share of the lifetime at renewal. Randomised, so that clusters that joined
together do not renew together.
"""

_SECOND = timedelta(seconds=1)

Extension = TypeVar("Extension", bound=x509.ExtensionType)


class Validity(NamedTuple):
    """Validity period in whole seconds."""

    start: datetime
    end: datetime
    backdated: bool = True
    """Whether `start` is earlier than the time of issue."""


def validity_period(
    lifetime: timedelta,
    now: datetime,
    *,
    until: datetime | None = None,
    not_before: datetime | None = None,
) -> Validity:
    """Return the validity of a certificate issued now, ending by `until` and starting no earlier than
    `not_before`.
    """
    if lifetime < _SECOND:
        raise InvalidSettings(
            f"certificate lifetime {lifetime} is too short", hint="use 1s or more"
        )
    now = now.replace(microsecond=0)
    try:
        end = now + timedelta(seconds=lifetime // _SECOND)
        end = end if until is None else min(end, until.replace(microsecond=0))
        start = now - min(CLOCK_SKEW, end - now)
    except OverflowError as error:
        raise InvalidSettings(
            f"certificate lifetime of {lifetime.days} days is too long"
        ) from error
    if not_before is None or not_before <= start:
        return Validity(start, end)
    # Rounded up to a whole second.
    start = max(now, (not_before + _SECOND - timedelta.resolution).replace(microsecond=0))
    if start >= end:
        raise InvalidSettings(f"certificate would start at {start}, after its end at {end}")
    return Validity(start, end, backdated=False)


def lifetime_of(certificate: x509.Certificate) -> timedelta:
    """Return the lifetime at issue.

    For certificates of other issuers it may be up to five minutes too short, or half if shorter than ten.
    """
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return end - start if certificate.serial_number & 1 else min_lifetime(start, end)


def min_lifetime(start: datetime, end: datetime) -> timedelta:
    """Return a lower bound of the lifetime at issue, if the serial number is not known."""
    return (end - start) - min(CLOCK_SKEW, (end - start) / 2)


def renewal_time(certificate: x509.Certificate) -> datetime:
    """Return the renewal time, when 20 to 25 % of the lifetime is left; deterministic for a certificate."""
    # Hashed, because other issuers may use sequential serial numbers.
    digest = hashlib.sha256(str(certificate.serial_number).encode()).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    left = MIN_REMAINING + (MAX_REMAINING - MIN_REMAINING) * fraction
    return certificate.not_valid_after_utc - left * lifetime_of(certificate)


def find_extension(certificate: x509.Certificate, kind: type[Extension]) -> Extension | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether the issuer's name is in the certificate and its key signed it."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def is_self_signed(certificate: x509.Certificate) -> bool:
    return is_issued_by(certificate, certificate)


def chain_for(
    authority: x509.Certificate, known: Iterable[x509.Certificate]
) -> tuple[x509.Certificate, ...]:
    """Return the intermediates to present after certificates signed by `authority`, in order; often none."""
    candidates = [each for each in dict.fromkeys(known) if not is_self_signed(each)]
    link = None if is_self_signed(authority) else authority
    found: list[x509.Certificate] = []
    while link is not None:
        found.append(link)
        others = (each for each in candidates if each not in found)
        link = next((each for each in others if is_issued_by(found[-1], each)), None)
    return tuple(found)
