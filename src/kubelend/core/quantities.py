"""Kubernetes quantities: exact parsing and formatting, without floats.

Every amount that enters or leaves the system is such a text ("500m", "256Mi", "1e3").
`core.resources` assigns units to them.

A quantity is `coefficient * 10**exponent` and keeps the notation in which it was written, because
Kubernetes prints it in the same notation. Parsing is stricter than in Kubernetes:

- a value over 2**63-1 is an error instead of being capped;
- a value finer than nano stays exact, so that the caller chooses the rounding;
- a text without a digit ("Ki", "-", ".") is an error instead of zero;
- an exponent beyond 64 is an error.
"""

from __future__ import annotations

import enum
import functools
import re
import reprlib
from typing import Final, NamedTuple

import msgspec

from kubelend.core import errors

MAX_AMOUNT: Final = 2**63 - 1
"""The largest magnitude of any amount: what Kubernetes, SQLite and numpy can all hold."""

MAX_QUANTITY_TEXT_LENGTH: Final = 64
"""Longer texts are rejected without parsing. The longest canonical text has 30 characters."""

MAX_EXPONENT: Final = 64
"""Larger absolute exponents are rejected before any power is computed."""


PARSE_CACHE_SIZE: Final = 2**12
"""Size of conversion caches: a large fleet sends the same texts all the time."""


class Format(enum.Enum):
    """The three notations of Kubernetes, under their Kubernetes names."""

    DECIMAL_SI = "DecimalSI"  # 12M
    BINARY_SI = "BinarySI"  # 12Mi
    DECIMAL_EXPONENT = "DecimalExponent"  # 12e6


class Quantity(msgspec.Struct, frozen=True):
    """An exact number in a notation. Create it with `parse` or `of`: both strip trailing zeros off
    the coefficient, so that equal values are equal records, and a value is an integer if and only
    if its exponent is not negative.

    >>> str(Quantity.parse("1.5Gi"))
    '1536Mi'
    >>> Quantity.parse("0.1").rounded_up(3)
    100
    """

    coefficient: int
    exponent: int
    format: Format

    @staticmethod
    @functools.lru_cache(maxsize=PARSE_CACHE_SIZE)
    def parse(text: str) -> Quantity:
        """Parses a text; raises `InvalidQuantity`. Cached."""
        if len(text) > MAX_QUANTITY_TEXT_LENGTH:
            raise _invalid(
                text, f"has {len(text)} characters, more than {MAX_QUANTITY_TEXT_LENGTH}"
            )
        match = _TEXT.fullmatch(text)
        if match is None:
            raise _invalid(text, "is not a quantity")
        suffix = _suffix(text, match)
        sign, whole, fraction = match.group("sign", "whole", "fraction")
        coefficient = int(f"{sign}{whole}{fraction}") * suffix.factor
        exponent = suffix.exponent - len(fraction)
        if _ceiling(abs(coefficient), exponent) > MAX_AMOUNT:
            raise _invalid(text, f"is out of range: its magnitude is over {MAX_AMOUNT} (2^63-1)")
        return Quantity(*_without_trailing_zeros(coefficient, exponent), suffix.format)

    @classmethod
    def of(cls, amount: int, places: int, format: Format) -> Quantity:
        """`amount` units of `10**-places`: `of(5950, 3, Format.DECIMAL_SI)` is 5950m.

        Not limited to `MAX_AMOUNT`: the sum over many clusters may exceed it and is still displayed.
        """
        return cls(*_without_trailing_zeros(amount, -places), format)

    def rounded_up(self, places: int) -> int:
        """In units of `10**-places`, rounded towards positive infinity."""
        return _ceiling(self.coefficient, self.exponent + places)

    def rounded_down(self, places: int) -> int:
        """In units of `10**-places`, rounded towards negative infinity."""
        return _floor(self.coefficient, self.exponent + places)

    def __str__(self) -> str:
        """The canonical form of Kubernetes: no fraction, the largest suffix without a loss."""
        coefficient, exponent = _at_least_nano(self.coefficient, self.exponent)
        if self.format is Format.BINARY_SI and exponent >= 0:
            whole = coefficient * 10**exponent
            if abs(whole) >= 1024:
                return _binary_text(whole)
        return _decimal_text(coefficient, exponent, self.format)


def parse_plain_amount(text: str, places: int) -> int | None:
    """Fast path of `parse` for common texts, in units of `10**-places`.

    Returns None for any other text, valid or not. A large fleet sends more distinct texts than the
    cache holds, and almost all are integers with one of these suffixes.
    """
    length = 0 if text.isdigit() else 2 if text.endswith("i") else 1
    digits, suffix = (text[:-length], text[-length:]) if length else (text, "")
    factor = _PLAIN_FACTORS.get((suffix, places))
    # Non-ASCII digits pass isdigit() and int().
    if factor is None or not digits.isdigit() or not digits.isascii() or len(digits) > 15:
        return None
    amount = int(digits) * factor
    return amount if amount <= MAX_AMOUNT else None


def format_plain_amount(amount: int, places: int, format: Format) -> str | None:
    """Fast path of formatting: the canonical text of `amount` units of `10**-places`, or None."""
    if amount <= 0 or format is Format.DECIMAL_EXPONENT:
        return None if amount else "0"
    if format is Format.BINARY_SI and (places or amount >= 1024):
        return None if places else _binary_text(amount)
    if amount % 1000:
        suffix = _PLAIN_SUFFIXES.get(places)
        return None if suffix is None else f"{amount}{suffix}"
    thousands = amount // 1000
    return str(thousands) if places == 3 and thousands % 1000 else None


_PLAIN_SUFFIXES: Final = {0: "", 3: "m"}
"""Suffix by `places`, for amounts that are not a multiple of a thousand."""


_PLAIN_FACTORS: Final = {
    ("", 0): 1,
    ("Ki", 0): 2**10,
    ("Mi", 0): 2**20,
    ("Gi", 0): 2**30,
    ("", 3): 1000,
    ("m", 3): 1,
}


class _Suffix(NamedTuple):
    factor: int
    exponent: int
    format: Format


_DECIMAL_SUFFIXES: Final = {
    "n": -9,
    "u": -6,
    "m": -3,
    "": 0,
    "k": 3,
    "M": 6,
    "G": 9,
    "T": 12,
    "P": 15,
    "E": 18,
}
_BINARY_SUFFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")

_SUFFIX_OF_EXPONENT: Final = {exponent: suffix for suffix, exponent in _DECIMAL_SUFFIXES.items()}
_SUFFIXES: Final = {
    **{suffix: _Suffix(1024**i, 0, Format.BINARY_SI) for i, suffix in enumerate(_BINARY_SUFFIXES)},
    # After the binary suffixes: a number without suffix is DecimalSI.
    **{suffix: _Suffix(1, power, Format.DECIMAL_SI) for suffix, power in _DECIMAL_SUFFIXES.items()},
}

# Possessive quantifiers: linear time for any input. An exponent is tried
# before a suffix, so that "1E3" is a thousand while "1E" is an exa.
_TEXT: Final = re.compile(
    r"(?P<sign>[+-]?+)(?=\.?[0-9])(?P<whole>[0-9]*+)\.?+(?P<fraction>[0-9]*+)"
    r"(?:[eE](?P<exponent>[+-]?+[0-9]++)|(?P<suffix>[^0-9.+-]*+))",
    re.ASCII,
)
_KNOWN_SUFFIXES: Final = " ".join(filter(None, (*_DECIMAL_SUFFIXES, *_BINARY_SUFFIXES)))
_HINT: Final = (
    f"write a number, alone or with one of {_KNOWN_SUFFIXES}, for example 1.5, 500m or 256Mi"
)


def _suffix(text: str, match: re.Match[str]) -> _Suffix:
    if match["exponent"]:
        exponent = int(match["exponent"])
        if abs(exponent) > MAX_EXPONENT:
            raise _invalid(text, f"is out of range: its exponent is beyond {MAX_EXPONENT}")
        return _Suffix(1, exponent, Format.DECIMAL_EXPONENT)
    suffix = _SUFFIXES.get(match["suffix"])
    if suffix is None:
        raise _invalid(text, f"has the unknown suffix {match['suffix']!r}")
    return suffix


def _invalid(text: str, problem: str) -> errors.InvalidQuantity:
    return errors.InvalidQuantity(f"{reprlib.repr(text)} {problem}", hint=_HINT)


def _without_trailing_zeros(coefficient: int, exponent: int) -> tuple[int, int]:
    if not coefficient:
        return 0, 0
    while coefficient % 10 == 0:
        coefficient //= 10
        exponent += 1
    return coefficient, exponent


def _floor(coefficient: int, exponent: int) -> int:
    """The largest integer not above `coefficient * 10**exponent`."""
    power: int = 10 ** abs(exponent)
    return coefficient * power if exponent >= 0 else coefficient // power


def _ceiling(coefficient: int, exponent: int) -> int:
    return -_floor(-coefficient, exponent)


def _at_least_nano(coefficient: int, exponent: int) -> tuple[int, int]:
    """Rounds to nano, the finest notation, away from zero as Kubernetes does."""
    if exponent >= -9:
        return coefficient, exponent
    nanos = _ceiling(abs(coefficient), exponent + 9)
    return _without_trailing_zeros(nanos if coefficient > 0 else -nanos, -9)


def _binary_text(whole: int) -> str:
    trailing_zero_bits = (whole & -whole).bit_length() - 1
    power = min(trailing_zero_bits // 10, len(_BINARY_SUFFIXES) - 1)
    return f"{whole >> 10 * power}{_BINARY_SUFFIXES[power]}"


def _decimal_text(coefficient: int, exponent: int, format: Format) -> str:
    zeros = exponent % 3
    number, power = coefficient * 10**zeros, exponent - zeros
    if power == 0:
        return str(number)
    if format is Format.DECIMAL_EXPONENT or power not in _SUFFIX_OF_EXPONENT:
        return f"{number}e{power}"
    return f"{number}{_SUFFIX_OF_EXPONENT[power]}"
