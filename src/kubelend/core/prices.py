"""Exact decimal prices per hour, and the cost of a request.

Prices are published as decimal texts per core-hour, GB-hour (10^9 bytes) and device-hour, and
stored as integer billionths of the currency, so that a published price is displayed unchanged.
Comparing offers only needs an ordering, so `filters.hourly_costs` uses floats; the agreed cost is
exact.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from kubelend.core.errors import InvalidInput
from kubelend.core.quantities import PARSE_CACHE_SIZE
from kubelend.core.resources import Resources

BILLIONTHS = 10**9
DEFAULT_CURRENCY = "USD"
"""Currency of a price or maximum price that names none."""
MAX_UNIT_PRICE = 10**9
"""Highest price per unit and hour: above is a typing error, below floats are exact enough."""

_TOLERANCE = 1 + 1e-12
_MAX_LENGTH = 20

_DECIMAL = re.compile(r"(\d{1,10})(?:\.(\d{1,9}))?", re.ASCII)
_CURRENCY = re.compile(r"[A-Za-z]{3,8}", re.ASCII)


class Prices(msgspec.Struct, frozen=True, omit_defaults=True):
    """Billionths of `currency` per hour of one core, GB or device; zero if not published."""

    currency: str
    cpu: int = 0
    memory: int = 0
    gpu: int = 0
    storage: int = 0

    def rates(self) -> tuple[float, float, float, float]:
        """Currency per hour of one milli-core, byte, device and byte, the units of `Resources`."""
        return (
            self.cpu / BILLIONTHS / 1000,
            self.memory / BILLIONTHS / 10**9,
            self.gpu / BILLIONTHS,
            self.storage / BILLIONTHS / 10**9,
        )

    def hourly_cost(self, amounts: Resources) -> int:
        """Cost per hour in billionths, as agreed at placement."""
        billionths = (
            amounts.cpu * self.cpu * 10**6
            + amounts.memory * self.memory
            + amounts.gpu * self.gpu * 10**9
            + amounts.storage * self.storage
        )
        return (billionths + 5 * 10**8) // 10**9


def parse_price(text: str, where: str) -> int:
    """Parses a decimal text into billionths: `0.05` is 50,000,000."""
    billionths = _billionths(text) if len(text) <= _MAX_LENGTH else None
    if billionths is None:
        raise InvalidInput(
            f"{where}: {text[:24]!r} is not a price",
            hint="write a plain decimal number such as 0.05",
        )
    return billionths


@lru_cache(maxsize=PARSE_CACHE_SIZE)
def _billionths(text: str) -> int | None:
    match = _DECIMAL.fullmatch(text)
    if match is None or int(match[1]) >= MAX_UNIT_PRICE:
        return None
    return int(match[1]) * BILLIONTHS + int((match[2] or "").ljust(9, "0"))


def max_price_limit(billionths: int) -> float:
    """The highest float cost that is within a maximum price; tolerates rounding errors."""
    return billionths / BILLIONTHS * _TOLERANCE


def format_price(billionths: int) -> str:
    """The shortest decimal text of a price: 50,000,000 is `0.05`."""
    whole, fraction = divmod(billionths, BILLIONTHS)
    return f"{whole}.{fraction:09d}".rstrip("0").rstrip(".")


def parse_currency(text_: str, where: str) -> str:
    """A currency code in upper case; compared as text, never converted."""
    if not _CURRENCY.fullmatch(text_):
        raise InvalidInput(
            f"{where}: {text_[:24]!r} is not a currency code", hint="write a code such as EUR"
        )
    return text_.upper()
