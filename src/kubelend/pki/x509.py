"""X.509 helpers: validity periods and renewal times of certificates, and their chains.

A certificate has no issue time, only notBefore, which is backdated because clocks differ. The backdating is
computed from the lifetime so that it can be inverted; where it could not be applied, the lowest bit of the
serial number is set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

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
        end = _earlier(now + timedelta(seconds=lifetime // _SECOND), until)
        start = now - min(CLOCK_SKEW, end - now)
    except OverflowError as error:
        raise InvalidSettings(
            f"certificate lifetime of {lifetime.days} days is too long"
        ) from error
    if not_before is None or not_before <= start:
        return Validity(start, end)
    start = max(now, _whole_second(not_before))
    if start >= end:
        raise InvalidSettings(f"certificate would start at {start}, after its end at {end}")
    return Validity(start, end, backdated=False)


def mark_backdated(serial: int, *, backdated: bool) -> int:
    """Encode into the lowest bit of a serial number whether the certificate is backdated."""
    return serial & ~1 if backdated else serial | 1


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
    left = MIN_REMAINING + (MAX_REMAINING - MIN_REMAINING) * _serial_fraction(
        certificate.serial_number
    )
    return certificate.not_valid_after_utc - left * lifetime_of(certificate)


def _earlier(end: datetime, until: datetime | None) -> datetime:
    return end if until is None else min(end, until.replace(microsecond=0))


def _whole_second(moment: datetime) -> datetime:
    floor = moment.replace(microsecond=0)
    return floor if floor == moment else floor + _SECOND


def _serial_fraction(serial: int) -> float:
    """Return a number from 0 to 1. Hashed, because other issuers may use sequential serial numbers."""
    digest = hashlib.sha256(str(serial).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether the issuer's name is in the certificate and its key signed it."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def is_self_signed(certificate: x509.Certificate) -> bool:
    """Whether the certificate is a root."""
    return is_issued_by(certificate, certificate)


def have_same_key(one: x509.Certificate, other: x509.Certificate) -> bool:
    """Whether both certificates have the same key."""
    return one.public_key() == other.public_key()


def chain_for(
    authority: x509.Certificate, known: Iterable[x509.Certificate]
) -> tuple[x509.Certificate, ...]:
    """Return the intermediates to present after certificates signed by `authority`, in order; often none."""
    candidates = [each for each in dict.fromkeys(known) if not is_self_signed(each)]
    found: list[x509.Certificate] = []
    link = _first_intermediate(authority, candidates)
    while link is not None:
        found.append(link)
        link = _find_issuer(link, [each for each in candidates if each not in found])
    return tuple(found)


def _first_intermediate(
    authority: x509.Certificate, candidates: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    """The authority itself if it is an intermediate, else a cross-signed certificate of it."""
    if not is_self_signed(authority):
        return authority
    for each in candidates:
        if each.subject == authority.subject and have_same_key(each, authority):
            return each
    return None


def _find_issuer(
    certificate: x509.Certificate, candidates: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    return next((each for each in candidates if is_issued_by(certificate, each)), None)
