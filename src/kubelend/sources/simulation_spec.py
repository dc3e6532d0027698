"""The spec of a simulated cluster: the records of its YAML file.

docs/simulated-clusters.md explains the file. Everything is validated on decoding, with errors that name
the field. Values stay strings here; `SimulatedCluster` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from kubelend.core import durations, prices, resources
from kubelend.core.errors import InvalidInput, KubelendError
from kubelend.core.resources import Resources
from kubelend.sources import object_semantics
from kubelend.wire import bodies, strict_yaml

AmountSpecs = dict[str, str | int]
"""Quantities by resource; a range ("100m..500m") from which a value is drawn for each pod."""

Count = Annotated[int, Meta(ge=1, le=100_000)]

_RATE: Final = re.compile(r"(?P<count>[0-9]{1,9}(?:\.[0-9]{1,9})?)/(?P<unit>s|m|h)", re.ASCII)
_SHARE: Final = re.compile(r"(?P<percent>100|[0-9]{1,2})%", re.ASCII)
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_MICROSECOND: Final = timedelta(microseconds=1)


class SpecRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=bodies.camel_case):
    """Base of all records. Unknown fields are errors."""


class Range(NamedTuple):
    """Integers between both ends, inclusive."""

    low: int
    high: int


class NodeGroup(SpecRecord, frozen=True):
    """Equal nodes: `<name>-1` to `<name>-<count>`."""

    capacity: AmountSpecs
    name: str = "node"
    count: Count = 1
    allocatable: AmountSpecs | None = None
    labels: dict[str, str] = {}
    ready: bool = True
    schedulable: bool = True

    def __post_init__(self) -> None:
        with _as_field_error("name"):
            object_semantics.parse_object_key(f"default/{self.name}")
        with _as_field_error():
            self.amounts()

    def amounts(self) -> tuple[Resources, Resources]:
        """Capacity and allocatable of each node."""
        capacity = resources.parse_offered(_as_texts(self.capacity), "capacity")
        if self.allocatable is None:
            return capacity, capacity
        return capacity, resources.parse_offered(_as_texts(self.allocatable), "allocatable")


class PodGroup(SpecRecord, frozen=True):
    """Pods that exist from the start and stay: a number of them, or a share of the cluster."""

    requests: AmountSpecs
    count: Count | None = None
    share: str = ""

    def __post_init__(self) -> None:
        with _as_field_error():
            self.amounts()
            if (self.count is None) == (not self.share):
                raise InvalidInput("count, share: set exactly one of them")
            self.percent()

    def amounts(self) -> Resources:
        """Requests of each pod."""
        return resources.parse_requested(_as_texts(self.requests), "requests")

    def percent(self) -> int:
        """The share; zero if a count is given."""
        if not self.share:
            return 0
        match = _SHARE.fullmatch(self.share)
        if match is None:
            raise InvalidInput(
                f"share: {self.share!r} is not a percentage", hint="use for example 40%"
            )
        return int(match["percent"])


class PodWorkload(SpecRecord, frozen=True):
    """Pods that are created and deleted continuously."""

    rate: str
    requests: AmountSpecs
    lifetime: str
    start: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """How many exist at the start, each at a random point of its lifetime."""

    def __post_init__(self) -> None:
        with _as_field_error():
            rate_interval(self.rate)
            self.amounts()
            parse_period(self.lifetime, "lifetime")

    def amounts(self) -> dict[str, Range]:
        """The range of each requested resource."""
        return {name: _amount_range(name, str(text)) for name, text in self.requests.items()}


class CostSpec(bodies.Cost, frozen=True, forbid_unknown_fields=True):
    """Prices as in an advertisement."""

    def __post_init__(self) -> None:
        with _as_field_error():
            for name in ("cpu_cost", "memory_cost", "gpu_cost", "storage_cost"):
                if price := getattr(self, name):
                    prices.parse_price(price, bodies.camel_case(name))
            prices.parse_currency(self.currency, "currency")


class SimulationSpec(SpecRecord, frozen=True):
    """A simulated cluster."""

    nodes: Annotated[list[NodeGroup], Meta(min_length=1)]
    cluster_id: str = ""
    seed: int = 0
    pods: list[PodGroup] = []
    work: list[PodWorkload] = []
    cost: CostSpec | None = None
    labels: dict[str, str] = {}
    region: str = ""

    def __post_init__(self) -> None:
        if len({group.name for group in self.nodes}) < len(self.nodes):
            raise ValueError("nodes: duplicate node name")


def load_simulation_spec(path: Path) -> SimulationSpec:
    """Read the spec from a file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    return parse_simulation_spec(text, str(path))


def parse_simulation_spec(text: str | bytes, where: str) -> SimulationSpec:
    """Parse the spec; errors begin with `where`."""
    try:
        found = strict_yaml.load_yaml(text.encode() if isinstance(text, str) else text)
        return strict_yaml.convert_record(found, SimulationSpec)
    except InvalidInput as error:
        raise InvalidInput(
            f"{where}: {error.message}", hint=error.hint or "see docs/simulated-clusters.md"
        ) from error


def steady_simulation_spec(
    nodes: int, pods: int, events_per_second: int, seed: int = 1
) -> SimulationSpec:
    """A cluster with about so many pods, of which so many are created or deleted each second."""
    slots, mean = 2 * -(-pods // nodes), 2_000_000 * pods // events_per_second
    work = PodWorkload(
        rate=f"{events_per_second // 2}.{5 * (events_per_second % 2)}/s",
        requests={"cpu": "10m..190m", "memory": "16Mi..240Mi"},
        lifetime=f"{mean // 2}us..{3 * mean // 2}us",
        start=pods,
    )
    capacity: AmountSpecs = {"cpu": f"{100 * slots}m", "memory": f"{128 * slots}Mi"}
    return SimulationSpec([NodeGroup(capacity, count=nodes)], seed=seed, work=[work])


def rate_interval(rate: str) -> int:
    """The mean interval of a rate, in microseconds."""
    match = _RATE.fullmatch(rate)
    if match is None or not Fraction(match["count"]):
        raise InvalidInput(f"rate: {rate!r} is not a rate", hint="use for example 2/s, 30/m or 1/h")
    return max(int(_UNIT_SECONDS[match["unit"]] * 1_000_000 / Fraction(match["count"])), 1)


def parse_moment(text: str, where: str) -> int:
    """A duration in microseconds, not negative."""
    try:
        found = durations.parse_duration(text) // _MICROSECOND
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}", hint=error.hint) from None
    if found < 0:
        raise InvalidInput(f"{where}: {text!r} is negative")
    return found


def parse_period(text: str, where: str) -> Range:
    """A duration or a range of durations ("30s..5m"), in microseconds."""
    low, high = _split_range(text)
    return _checked_range(parse_moment(low, where), parse_moment(high, where), where)


@contextmanager
def _as_field_error(field: str = "") -> Iterator[None]:
    """Raises errors as a class that msgspec reports with the field's path."""
    try:
        yield
    except KubelendError as error:
        raise ValueError(f"{field}: {error}" if field else str(error)) from error


def _as_texts(amounts: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(amount) for name, amount in amounts.items()}


def _amount_range(name: str, text: str) -> Range:
    low, high = (
        resources.parse_requested({name: end}, "requests").amount(name)
        for end in _split_range(text)
    )
    return _checked_range(low, high, f"requests.{name}")


def _split_range(text: str) -> tuple[str, str]:
    low, dots, high = text.partition("..")
    return (low, high) if dots else (low, low)


def _checked_range(low: int, high: int, where: str) -> Range:
    if high < low:
        raise InvalidInput(f"{where}: the end is below the start")
    return Range(low, high)
