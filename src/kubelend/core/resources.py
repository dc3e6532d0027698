"""Resource vectors and their arithmetic; the display score of a cluster.

Amounts are exact integers in fixed units (milli-CPU, bytes, whole devices). `parse_requested`
rounds up and `parse_offered` rounds down, so that rounding never promises more than a cluster has.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final, NamedTuple

import msgspec

from kubelend.core import errors
from kubelend.core.quantities import (
    MAX_AMOUNT,
    Format,
    Quantity,
    format_plain_amount,
    parse_plain_amount,
)


# gc=False: instances are acyclic, and there are hundreds of thousands of them.
class Resources(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Amounts by resource. Amounts may be negative: an overcommitted cluster has to be visible.

    >>> requested = parse_requested({"cpu": "2", "memory": "1Gi"})
    >>> (requested - parse_requested({"cpu": "500m"})).describe()
    '1500m CPU / 1Gi Memory'
    """

    cpu: int = 0
    """Thousandths of a core."""
    memory: int = 0
    """Bytes."""
    gpu: int = 0
    """Whole devices; `nvidia.com/gpu` in Kubernetes."""
    storage: int = 0
    """Bytes."""
    extended: dict[str, int] = {}
    """By their Kubernetes name, in whole units. Shared between vectors: do not mutate."""

    @classmethod
    def of(cls, amounts: Mapping[str, int]) -> Resources:
        """The inverse of `items`. Accepts `nvidia.com/gpu` for `gpu`."""
        parts: dict[str, int] = {}
        for name, amount in amounts.items():
            field = _ALIASES.get(name, name)
            parts[field] = parts.get(field, 0) + amount
        return _vector(parts)

    def __post_init__(self) -> None:
        # Explicit zeros are dropped, so that equal vectors compare equal.
        if self.extended and 0 in self.extended.values():
            some = {name: amount for name, amount in self.extended.items() if amount}
            msgspec.structs.force_setattr(self, "extended", some)

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu + other.cpu,
            self.memory + other.memory,
            self.gpu + other.gpu,
            self.storage + other.storage,
            _sum(self.extended, other.extended) if other.extended else self.extended,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu - other.cpu,
            self.memory - other.memory,
            self.gpu - other.gpu,
            self.storage - other.storage,
            _sum(self.extended, other.extended, -1) if other.extended else self.extended,
        )

    def __bool__(self) -> bool:
        """Whether any amount is not zero."""
        return bool(self.cpu or self.memory or self.gpu or self.storage or self.extended)

    def __hash__(self) -> int:
        extended = frozenset(self.extended.items())
        return hash((self.cpu, self.memory, self.gpu, self.storage, extended))

    def clamped(self) -> Resources:
        """The vector with negative amounts replaced by zero."""
        return Resources(
            max(self.cpu, 0),
            max(self.memory, 0),
            max(self.gpu, 0),
            max(self.storage, 0),
            {name: amount for name, amount in self.extended.items() if amount > 0}
            if self.extended
            else self.extended,
        )

    def elementwise_max(self, other: Resources) -> Resources:
        """The larger amount of each resource."""
        return self + (other - self).clamped()

    def fits_in(self, free: Resources) -> bool:
        """Whether every requested amount is free; an exact fit fits.

        A resource that is not requested always fits, as in Kubernetes: a cluster that lost a lent
        GPU can still lend CPU.
        """
        return (
            (self.cpu <= free.cpu or self.cpu <= 0)
            and (self.memory <= free.memory or self.memory <= 0)
            and (self.gpu <= free.gpu or self.gpu <= 0)
            and (self.storage <= free.storage or self.storage <= 0)
            and (not self.extended or not _missing(self.extended, free.extended))
        )

    def shortfall(self, free: Resources) -> Resources:
        """The smallest amounts that have to be added to `free` to make this fit; zero if it fits."""
        if self.fits_in(free):
            return NOTHING
        return Resources.of(_missing(dict(self.items()), dict(free.items())))

    def items(self) -> list[tuple[str, int]]:
        """The amounts that are not zero: cpu, memory, gpu, storage, then extended resources by name."""
        parts = [("cpu", self.cpu), ("memory", self.memory)]
        if self.gpu or self.storage or self.extended:
            parts += ("gpu", self.gpu), ("storage", self.storage), *sorted(self.extended.items())
        return [part for part in parts if part[1]]

    def amount(self, name: str) -> int:
        """Amount of a resource in its unit; zero if absent."""
        name = _ALIASES.get(name, name)
        named: int = getattr(self, name) if name in _DISPLAY_NAMES else self.extended.get(name, 0)
        return named

    def quantities(self) -> dict[str, str]:
        """Canonical quantities by name, in the order of `items`.

        CPU and memory are always there, because bodies and objects require them.
        """
        amounts = {"cpu": 0, "memory": 0, **dict(self.items())}
        return {name: format_amount(name, amount) for name, amount in amounts.items()}

    def describe(self) -> str:
        """For people: "500m CPU / 256Mi Memory / 2 GPU"."""
        return " / ".join(
            f"{amount} {_DISPLAY_NAMES.get(name, name)}"
            for name, amount in self.quantities().items()
        )


NOTHING: Final = Resources()


def parse_requested(texts: Mapping[str, str], where: str = "") -> Resources:
    """Parses requested quantities, rounding up. Errors name the field: `<where>.cpu: ...`."""
    return _vector(_parse_amounts(texts, Quantity.rounded_up, where))


def parse_offered(texts: Mapping[str, str], where: str = "") -> Resources:
    """Parses offered quantities, rounding down. Errors name the field: `<where>.cpu: ...`."""
    return _vector(_parse_amounts(texts, Quantity.rounded_down, where))


def parse_exact(cpu: str, memory: str, gpu: str, storage: str) -> Resources | None:
    """Fast path for common texts without rounding; else None. `gpu` and `storage` may be empty."""
    cores = parse_plain_amount(cpu, _CORES.places)
    bytes_ = parse_plain_amount(memory, _BYTES.places)
    devices = parse_plain_amount(gpu, _DEVICES.places) if gpu else 0
    disk = parse_plain_amount(storage, _BYTES.places) if storage else 0
    if cores is None or bytes_ is None or devices is None or disk is None:
        return None
    return Resources(cores, bytes_, devices, disk)


def parse_caps(texts: Mapping[str, str], where: str = "") -> dict[str, int]:
    """Parses caps by resource, rounding down. Zero is kept: it allows none."""
    return _parse_amounts(texts, Quantity.rounded_down, where)


def format_amount(name: str, amount: int) -> str:
    """One amount as a canonical quantity: `text("cpu", 1500)` is "1500m"."""
    unit = _unit(name)
    return format_plain_amount(amount, *unit) or str(Quantity.of(amount, *unit))


_DISPLAY_NAMES: Final = {"cpu": "CPU", "memory": "Memory", "gpu": "GPU", "storage": "Storage"}
_ALIASES: Final = {"nvidia.com/gpu": "gpu"}


class _Unit(NamedTuple):
    places: int
    format: Format


_CORES: Final = _Unit(3, Format.DECIMAL_SI)
_BYTES: Final = _Unit(0, Format.BINARY_SI)
_DEVICES: Final = _Unit(0, Format.DECIMAL_SI)
_UNITS: Final = {
    "cpu": _CORES,
    "memory": _BYTES,
    "gpu": _DEVICES,
    "storage": _BYTES,
    "ephemeral-storage": _BYTES,
}

# An optional DNS subdomain and a slash, then a name. Possessive quantifiers: linear time.
_NAME: Final = re.compile(
    r"(?:(?=[^/]{1,253}/)[a-z0-9]++(?:(?:-++|\.)[a-z0-9]++)*+/)?+"
    r"(?=[^/]{1,63}\Z)[A-Za-z0-9]++(?:[-_.]++[A-Za-z0-9]++)*+",
    re.ASCII,
)


def _parse_amounts(
    texts: Mapping[str, str], rounded: Callable[[Quantity, int], int], where: str
) -> dict[str, int]:
    amounts: dict[str, int] = {}
    name = ""
    try:
        for name, quantity in texts.items():
            field = _ALIASES.get(name, name)
            if field in amounts:
                raise errors.InvalidInput("is given twice", hint=f"use only {field}")
            places = _unit(field).places
            plain = parse_plain_amount(quantity, places)
            amounts[field] = _parse_amount(quantity, places, rounded) if plain is None else plain
    except errors.InvalidInput as error:
        raise _with_field(error, where, name) from None
    return amounts


def _parse_amount(quantity: str, places: int, rounded: Callable[[Quantity, int], int]) -> int:
    parsed = Quantity.parse(quantity)
    amount = rounded(parsed, places)
    if parsed.coefficient < 0:
        raise errors.InvalidQuantity(f"{quantity!r} is negative", hint="write zero or more")
    if amount > MAX_AMOUNT:
        raise errors.InvalidQuantity(f"{quantity!r} is out of range", hint="write a smaller amount")
    return amount


def _with_field(problem: errors.InvalidInput, where: str, name: str) -> errors.InvalidInput:
    shown = name if _NAME.fullmatch(name) else reprlib.repr(name)
    path = f"{where}.{shown}" if where else shown
    return type(problem)(f"{path}: {problem.message}", hint=problem.hint)


@functools.lru_cache(maxsize=1024)
def _unit(name: str) -> _Unit:
    if not _NAME.fullmatch(name):
        raise errors.InvalidInput(
            "is not a Kubernetes resource name",
            hint="write for example cpu, memory or example.com/fpga",
        )
    return _BYTES if name.startswith("hugepages-") else _UNITS.get(name, _DEVICES)


def _vector(parts: dict[str, int]) -> Resources:
    """Builds a vector; consumes `parts` and keeps the rest of it as `extended`."""
    pop = parts.pop
    return Resources(pop("cpu", 0), pop("memory", 0), pop("gpu", 0), pop("storage", 0), parts)


def _sum(mine: dict[str, int], others: dict[str, int], sign: int = 1) -> dict[str, int]:
    total = mine.copy()
    for name, amount in others.items():
        total[name] = total.get(name, 0) + sign * amount
    return total


def _missing(wanted: dict[str, int], free: dict[str, int]) -> dict[str, int]:
    return {
        name: amount - free.get(name, 0)
        for name, amount in wanted.items()
        if amount > 0 and amount > free.get(name, 0)
    }


_DISPLAY_BANDS = ((90, "Excellent"), (70, "Good"), (50, "Moderate"))


def display_score(available: Resources, allocatable: Resources) -> Fraction:
    """Half for CPU and half for memory; zero if a cluster has none of either."""
    if not allocatable.cpu or not allocatable.memory:
        return Fraction(0)
    free = available.clamped()
    return Fraction(free.cpu * 50, allocatable.cpu) + Fraction(free.memory * 50, allocatable.memory)


def display_score_text(rating: Fraction) -> str:
    """Two decimals, as in the status of a ClusterAdvertisement."""
    hundredths = int(rating * 100 + Fraction(1, 2))
    return f"{hundredths // 100}.{hundredths % 100:02d}"


def display_band(rating: Fraction) -> str:
    """The band of a score: Excellent, Good, Moderate or Limited."""
    return next((name for floor, name in _DISPLAY_BANDS if rating >= floor), "Limited")
