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
from kubelend.sources import documents, names
from kubelend.wire import bodies

Amounts = dict[str, str | int]
"""Quantities by resource; a range ("100m..500m") from which a value is drawn for each pod."""

Count = Annotated[int, Meta(ge=1, le=100_000)]

_RATE: Final = re.compile(r"(?P<count>[0-9]{1,9}(?:\.[0-9]{1,9})?)/(?P<unit>s|m|h)", re.ASCII)
_SHARE: Final = re.compile(r"(?P<percent>100|[0-9]{1,2})%", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_MICROSECOND: Final = timedelta(microseconds=1)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=bodies.camel):
    """Base of all records. Unknown fields are errors."""


class Range(NamedTuple):
    """Integers between both ends, inclusive."""

    low: int
    high: int


class NodeGroup(Record, frozen=True):
    """Equal nodes: `<name>-1` to `<name>-<count>`."""

    capacity: Amounts
    name: str = "node"
    count: Count = 1
    allocatable: Amounts | None = None
    labels: dict[str, str] = {}
    ready: bool = True
    schedulable: bool = True

    def __post_init__(self) -> None:
        with _checked("name"):
            names.parse(f"default/{self.name}")
        with _checked():
            self.amounts()

    def amounts(self) -> tuple[Resources, Resources]:
        """Capacity and allocatable of each node."""
        capacity = _offered(self.capacity, "capacity")
        if self.allocatable is None:
            return capacity, capacity
        return capacity, _offered(self.allocatable, "allocatable")


class PodGroup(Record, frozen=True):
    """Pods that exist from the start and stay: a number of them, or a share of the cluster."""

    requests: Amounts
    count: Count | None = None
    share: str = ""

    def __post_init__(self) -> None:
        with _checked():
            self.amounts()
            if (self.count is None) == (not self.share):
                raise InvalidInput("count, share: set exactly one of them")
            self.percent()

    def amounts(self) -> Resources:
        """Requests of each pod."""
        return resources.asked(_texts(self.requests), "requests")

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


class Work(Record, frozen=True):
    """Pods that are created and deleted continuously."""

    rate: str
    requests: Amounts
    lifetime: str
    start: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """How many exist at the start, each at a random point of its lifetime."""

    def __post_init__(self) -> None:
        with _checked():
            interval(self.rate)
            self.amounts()
            period(self.lifetime, "lifetime")

    def amounts(self) -> dict[str, Range]:
        """The range of each requested resource."""
        return {name: _amounts(name, str(text)) for name, text in self.requests.items()}


class Failure(Record, frozen=True):
    """A node that fails or is removed: a named one at a given time, or random ones at a rate."""

    node: str = ""
    at: str = ""
    rate: str = ""
    repair: str = ""
    """How long the repair takes; never repaired if empty."""
    gone: bool = False
    """Whether it is removed from the cluster, with its pods; the repair is then a new node."""

    def __post_init__(self) -> None:
        with _checked():
            if bool(self.node and self.at) == bool(self.rate) or bool(self.node) != bool(self.at):
                raise InvalidInput("set either node and at, or rate")
            if self.at:
                moment(self.at, "at")
            if self.rate:
                interval(self.rate)
            if self.repair:
                period(self.repair, "repair")


class Agent(Record, frozen=True):
    """Faults of the agent's machine and network; the agent process injects them."""

    clock_skew: str = "0s"
    """How far its clock is ahead; negative if behind."""
    network_delay: str = "0s"
    """Added to every call to the broker."""
    dies_after: str = ""
    """When its process exits abruptly; never if empty."""

    def __post_init__(self) -> None:
        with _checked("clockSkew"):
            durations.parse(self.clock_skew)
        with _checked():
            moment(self.network_delay, "networkDelay")
            if self.dies_after:
                moment(self.dies_after, "diesAfter")


class Cost(bodies.Cost, frozen=True, forbid_unknown_fields=True):
    """Prices as in an advertisement."""

    def __post_init__(self) -> None:
        with _checked():
            for name in ("cpu_cost", "memory_cost", "gpu_cost", "storage_cost"):
                if price := getattr(self, name):
                    prices.parse(price, bodies.camel(name))
            prices.parse_currency(self.currency, "currency")


class Description(Record, frozen=True):
    """A simulated cluster."""

    nodes: Annotated[list[NodeGroup], Meta(min_length=1)]
    cluster_id: str = ""
    seed: int = 0
    pods: list[PodGroup] = []
    work: list[Work] = []
    failures: list[Failure] = []
    agent: Agent = msgspec.field(default_factory=Agent)
    cost: Cost | None = None
    labels: dict[str, str] = {}
    region: str = ""

    def __post_init__(self) -> None:
        with _checked():
            known = self.node_names()
            if len(set(known)) < len(known):
                raise InvalidInput("nodes: duplicate node name")
            for index, failure in enumerate(self.failures):
                if failure.node and failure.node not in known:
                    raise InvalidInput(f"failures[{index}].node: {failure.node} not found")

    def node_names(self) -> list[str]:
        return [
            f"{group.name}-{number}" for group in self.nodes for number in range(1, group.count + 1)
        ]


def load(path: Path) -> Description:
    """Read the spec from a file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: str | bytes, where: str) -> Description:
    """Parse the spec; errors begin with `where`."""
    try:
        found = documents.values(text.encode() if isinstance(text, str) else text)
        return documents.record(found, Description)
    except InvalidInput as problem:
        raise InvalidInput(
            f"{where}: {problem.message}", hint=problem.hint or "see docs/simulated-clusters.md"
        ) from problem


def steady(nodes: int, pods: int, events_per_second: int, seed: int = 1) -> Description:
    """A cluster with about so many pods, of which so many are created or deleted each second."""
    room = 2 * -(-pods // nodes)
    work = Work(
        rate=f"{events_per_second // 2}.{5 * (events_per_second % 2)}/s",
        requests={"cpu": "10m..190m", "memory": "16Mi..240Mi"},
        lifetime=_around(Fraction(2 * pods, events_per_second)),
        start=pods,
    )
    capacity: Amounts = {"cpu": f"{100 * room}m", "memory": f"{128 * room}Mi"}
    return Description([NodeGroup(capacity, count=nodes)], seed=seed, work=[work])


def interval(rate: str) -> int:
    """The mean interval of a rate, in microseconds."""
    match = _RATE.fullmatch(rate)
    if match is None or not Fraction(match["count"]):
        raise InvalidInput(f"rate: {rate!r} is not a rate", hint="use for example 2/s, 30/m or 1/h")
    return max(int(_SECONDS[match["unit"]] * 1_000_000 / Fraction(match["count"])), 1)


def moment(text: str, where: str) -> int:
    """A duration in microseconds, not negative."""
    try:
        found = durations.parse(text) // _MICROSECOND
    except InvalidInput as problem:
        raise InvalidInput(f"{where}: {problem.message}", hint=problem.hint) from None
    if found < 0:
        raise InvalidInput(f"{where}: {text!r} is negative")
    return found


def period(text: str, where: str) -> Range:
    """A duration or a range of durations ("30s..5m"), in microseconds."""
    low, high = _ends(text)
    return _range(moment(low, where), moment(high, where), where)


@contextmanager
def _checked(field: str = "") -> Iterator[None]:
    """Raises errors as a class that msgspec reports with the field's path."""
    try:
        yield
    except KubelendError as problem:
        raise ValueError(f"{field}: {problem}" if field else str(problem)) from problem


def _around(seconds: Fraction) -> str:
    """A range of durations with this mean."""
    return f"{int(seconds * 500_000)}us..{int(seconds * 1_500_000)}us"


def _offered(amounts: Amounts, where: str) -> Resources:
    return resources.offered(_texts(amounts), where)


def _texts(amounts: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(amount) for name, amount in amounts.items()}


def _amounts(name: str, text: str) -> Range:
    low, high = (_amount(name, end) for end in _ends(text))
    return _range(low, high, f"requests.{name}")


def _amount(name: str, text: str) -> int:
    return resources.asked({name: text}, "requests").amount(name)


def _ends(text: str) -> tuple[str, str]:
    low, dots, high = text.partition("..")
    return (low, high) if dots else (low, low)


def _range(low: int, high: int, where: str) -> Range:
    if high < low:
        raise InvalidInput(f"{where}: the end is below the start")
    return Range(low, high)
