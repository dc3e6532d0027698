"""Go durations ("1h30m", "90s", "500ms"), as flags, bodies and objects contain them.

Internally a duration is a `timedelta`, which counts whole microseconds. A finer part is rounded
away from zero, because for many settings zero means "off". Timestamps as
integer microseconds fit numpy columns and allow exact cost arithmetic.
"""

from __future__ import annotations

import functools
import math
import re
import reprlib
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Final

from kubelend.core import errors

MAX_DURATION: Final = timedelta(microseconds=(2**63 - 1) // 1000)
"""About 292 years, the maximum of Go's time.Duration."""

MAX_DURATION_TEXT_LENGTH: Final = 64
"""Longer texts are rejected without parsing."""


@functools.lru_cache(maxsize=1024)
def parse_duration(text: str) -> timedelta:
    """Parses a text; raises `InvalidDuration`."""
    if len(text) > MAX_DURATION_TEXT_LENGTH:
        raise _invalid(text, f"has {len(text)} characters, more than {MAX_DURATION_TEXT_LENGTH}")
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _invalid(text, _describe_error(text))
    parts = _PART.findall(match["parts"] or "")
    microseconds = math.ceil(sum(Fraction(number) * _MICROSECONDS[unit] for number, unit in parts))
    if microseconds > MAX_DURATION // _MICROSECOND:
        raise _invalid(text, "is out of range: it is over 292 years")
    return timedelta(microseconds=-microseconds if match["sign"] == "-" else microseconds)


def format_duration(duration: timedelta) -> str:
    """Formats a duration as Go does: "1h0m0s", "1m30s", "1.5ms", "0s"."""
    microseconds = duration // _MICROSECOND
    sign, microseconds = ("-", -microseconds) if microseconds < 0 else ("", microseconds)
    if microseconds < _SECOND:
        return sign + _format_below_one_second(microseconds)
    minutes, rest = divmod(microseconds, 60 * _SECOND)
    seconds = f"{_format_decimal(rest, _SECOND)}s"
    if not minutes:
        return f"{sign}{seconds}"
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}h{minutes}m{seconds}" if hours else f"{sign}{minutes}m{seconds}"


def format_duration_short(duration: timedelta) -> str:
    """The Go format without trailing zero units: "1h30m", "2h"."""
    full = format_duration(duration)
    full = full[:-2] if full.endswith("m0s") else full
    return full[:-2] if full.endswith("h0m") else full


_MICROSECOND: Final = timedelta(microseconds=1)
_SECOND: Final = 1_000_000
_MICROSECONDS: Final = {
    "ns": Fraction(1, 1000),
    "us": Fraction(1),
    "\u00b5s": Fraction(1),  # micro sign, which Go prints
    "\u03bcs": Fraction(1),  # Greek letter mu
    "ms": Fraction(1000),
    "s": Fraction(_SECOND),
    "m": Fraction(60 * _SECOND),
    "h": Fraction(3600 * _SECOND),
}

# Possessive quantifiers: linear time for any input. Longer units come first, so that "ms" is not
# parsed as "m".
_NUMBER: Final = r"(?=\.?[0-9])[0-9]*+\.?+[0-9]*+"
_UNIT: Final = "|".join(sorted(_MICROSECONDS, key=len, reverse=True))
_PART: Final = re.compile(rf"({_NUMBER})({_UNIT})", re.ASCII)
_TEXT: Final = re.compile(rf"(?P<sign>[+-]?+)(?:0|(?P<parts>(?:{_NUMBER}(?>{_UNIT}))++))", re.ASCII)
_UNKNOWN_UNIT: Final = re.compile(
    rf"[+-]?+(?:{_NUMBER}(?>{_UNIT}))*+{_NUMBER}(?P<unit>[^0-9.]*+).*+", re.ASCII | re.DOTALL
)
_HINT: Final = "write numbers with units, for example 1h30m, 90s or 500ms"


def _describe_error(text: str) -> str:
    match = _UNKNOWN_UNIT.fullmatch(text)
    if match is None:
        return "is not a duration"
    unit = match["unit"]
    return f"has the unknown unit {unit!r}" if unit else "has a number without a unit"


def _invalid(text: str, problem: str) -> errors.InvalidDuration:
    return errors.InvalidDuration(f"{reprlib.repr(text)} {problem}", hint=_HINT)


def _format_below_one_second(microseconds: int) -> str:
    if not microseconds:
        return "0s"
    if microseconds < 1000:
        return f"{microseconds}\u00b5s"
    return f"{_format_decimal(microseconds, 1000)}ms"


def _format_decimal(amount: int, unit: int) -> str:
    """`amount / unit` in the fewest digits that are exact; `unit` is a power of ten."""
    whole, part = divmod(amount, unit)
    fraction = str(unit + part)[1:].rstrip("0")
    return f"{whole}.{fraction}" if fraction else str(whole)


EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
HOUR_MICROS: Final = 3_600_000_000
"""In microseconds, as all integers of this module."""
DAY_MICROS: Final = 24 * HOUR_MICROS

_ONE_MICROSECOND: Final = timedelta(microseconds=1)


def to_micros(at: datetime) -> int:
    """Microseconds since the Unix epoch."""
    return (at - EPOCH) // _ONE_MICROSECOND


def from_micros(at: int) -> datetime:
    """The inverse of `to_micros`."""
    return EPOCH + timedelta(microseconds=at)


def format_time(at: datetime, now: datetime) -> str:
    """Formats a timestamp for messages; the date is omitted if it is today."""
    return f"{at:%H:%M:%S} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S} UTC"
