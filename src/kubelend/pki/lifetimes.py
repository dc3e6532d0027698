"""From when until when a certificate is valid, and when its holder renews it.

The authority asks for the first; agents, commands and the broker for the second, with nothing but
the certificate in hand. A certificate does not say when it was issued, only from when it is valid,
and that is earlier: clocks differ. So the backdating follows from the lifetime in a way that can be
turned around, and where it could not be done, the lowest bit of the serial number says so.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from kubelend.core.errors import InvalidSettings

if TYPE_CHECKING:
    # The library costs a process 11 MB; who has a certificate has it already.
    from cryptography import x509

CLOCK_SKEW = timedelta(minutes=5)
"""A peer's clock may be behind ours, and a fresh certificate would not be valid there yet."""

LEAST_LEFT, MOST_LEFT = 0.20, 0.25
"""The part of its life that is left when a certificate is renewed: not the same for all, so that a
fleet which joined at once does not renew at once."""

_SECOND = timedelta(seconds=1)


class Validity(NamedTuple):
    """From when until when; whole seconds, as certificates count them."""

    start: datetime
    end: datetime
    backdated: bool = True
    """Whether it starts earlier than it was issued."""


def validity(
    lifetime: timedelta,
    now: datetime,
    *,
    until: datetime | None = None,
    not_before: datetime | None = None,
) -> Validity:
    """For a certificate issued now: it ends by `until`, and does not start before `not_before`."""
    if lifetime < _SECOND:
        raise InvalidSettings(f"a certificate cannot live for {lifetime}", hint="give 1s or more")
    now = now.replace(microsecond=0)
    try:
        end = _earlier(now + timedelta(seconds=lifetime // _SECOND), until)
        start = now - min(CLOCK_SKEW, end - now)
    except OverflowError as error:
        raise InvalidSettings(f"a certificate cannot live for {lifetime.days} days") from error
    if not_before is None or not_before <= start:
        return Validity(start, end)
    start = max(now, _whole_second(not_before))
    if start >= end:
        raise InvalidSettings(f"a certificate that starts at {start} cannot end at {end}")
    return Validity(start, end, backdated=False)


def marked(serial: int, *, backdated: bool) -> int:
    """The same random serial number, with what `life` must know in its lowest bit."""
    return serial & ~1 if backdated else serial | 1


def life(certificate: x509.Certificate) -> timedelta:
    """How long it was to live when it was issued.

    Of another issuer's it may be up to five minutes too short, or half of what is shorter than ten.
    """
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return end - start if certificate.serial_number & 1 else least_life(start, end)


def least_life(start: datetime, end: datetime) -> timedelta:
    """The same, where the serial number is not known: it may be shorter by the backdating."""
    return (end - start) - min(CLOCK_SKEW, (end - start) / 2)


def renew_at(certificate: x509.Certificate) -> datetime:
    """When 20 to 25 % of its life is left: at random, but always the same for one certificate."""
    left = LEAST_LEFT + (MOST_LEFT - LEAST_LEFT) * _chance(certificate.serial_number)
    return certificate.not_valid_after_utc - left * life(certificate)


def _earlier(end: datetime, until: datetime | None) -> datetime:
    return end if until is None else min(end, until.replace(microsecond=0))


def _whole_second(moment: datetime) -> datetime:
    floor = moment.replace(microsecond=0)
    return floor if floor == moment else floor + _SECOND


def _chance(serial: int) -> float:
    """From 0 up to 1. Hashed, for others may count their serial numbers up."""
    digest = hashlib.sha256(str(serial).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
