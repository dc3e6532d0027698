"""What a simulated cluster is like, as its YAML file says it: records, and what may stand in them.

docs/simulated-clusters.md explains the file. Everything is checked when it is read, and errors name the
field. Texts stay texts here; `worlds` asks for what they mean.
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
"""Quantities by resource; a range ("100m..500m") where one is drawn for each pod."""

Count = Annotated[int, Meta(ge=1, le=100_000)]

_RATE: Final = re.compile(r"(?P<count>[0-9]{1,9}(?:\.[0-9]{1,9})?)/(?P<unit>s|m|h)", re.ASCII)
_SHARE: Final = re.compile(r"(?P<percent>100|[0-9]{1,2})%", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_MICROSECOND: Final = timedelta(microseconds=1)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=bodies.camel):
    """The common shape. A field that is not known is an error: nobody writes one for nothing."""


class Range(NamedTuple):
    """Whole numbers from one to the other, both included."""

    low: int
    high: int


class NodeGroup(Record, frozen=True):
    """Nodes that are alike: `<name>-1` to `<name>-<count>`."""

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
        """Capacity and allocatable of each."""
        capacity = _offered(self.capacity, "capacity")
        if self.allocatable is None:
            return capacity, capacity
        return capacity, _offered(self.allocatable, "allocatable")


class PodGroup(Record, frozen=True):
    """Pods that are there from the start and stay: so many, or as many as make up a share of the cluster."""

    requests: Amounts
    count: Count | None = None
    share: str = ""

    def __post_init__(self) -> None:
        with _checked():
            self.amounts()
            if (self.count is None) == (not self.share):
                raise InvalidInput("count, share: is to have one of the two")
            self.percent()

    def amounts(self) -> Resources:
        """Of each pod."""
        return resources.asked(_texts(self.requests), "requests")

    def percent(self) -> int:
        """The share; zero if a count is given."""
        if not self.share:
            return 0
        match = _SHARE.fullmatch(self.share)
        if match is None:
            raise InvalidInput(f"share: {self.share!r} is no share", hint="write for example 40%")
        return int(match["percent"])


class Work(Record, frozen=True):
    """Pods that come and go."""

    rate: str
    requests: Amounts
    lifetime: str
    start: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """How many are there already, each somewhere in its life."""

    def __post_init__(self) -> None:
        with _checked():
            interval(self.rate)
            self.amounts()
            period(self.lifetime, "lifetime")

    def amounts(self) -> dict[str, Range]:
        """What a pod asks for lies in these, by resource."""
        return {name: _amounts(name, str(text)) for name, text in self.requests.items()}


class Failure(Record, frozen=True):
    """A node that fails for a while, or leaves: a certain one at a certain time, or any one now and then."""

    node: str = ""
    at: str = ""
    rate: str = ""
    repair: str = ""
    """How long it takes; for ever if empty."""
    gone: bool = False
    """Whether it leaves the cluster, with its pods; a repair is then another node that joins."""

    def __post_init__(self) -> None:
        with _checked():
            if bool(self.node and self.at) == bool(self.rate) or bool(self.node) != bool(self.at):
                raise InvalidInput("is to have either node and at, or rate")
            if self.at:
                moment(self.at, "at")
            if self.rate:
                interval(self.rate)
            if self.repair:
                period(self.repair, "repair")


class Agent(Record, frozen=True):
    """What is wrong with the agent's machine and network; the agent's process sees to it."""

    clock_skew: str = "0s"
    """How far its clock is ahead; negative if behind."""
    network_delay: str = "0s"
    """What every call to the broker takes longer."""
    dies_after: str = ""
    """When its process ends, without a word; never if empty."""

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
    """A cluster that is not there."""

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
                raise InvalidInput("nodes: two would have the same name")
            for index, failure in enumerate(self.failures):
                if failure.node and failure.node not in known:
                    raise InvalidInput(f"failures[{index}].node: {failure.node} is not there")

    def node_names(self) -> list[str]:
        return [
            f"{group.name}-{number}" for group in self.nodes for number in range(1, group.count + 1)
        ]


def load(path: Path) -> Description:
    """The description in a file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: str | bytes, where: str) -> Description:
    """The description in a text; errors begin with `where` it is from."""
    try:
        found = documents.values(text.encode() if isinstance(text, str) else text)
        return documents.record(found, Description)
    except InvalidInput as problem:
        raise InvalidInput(
            f"{where}: {problem.message}", hint=problem.hint or "see docs/simulated-clusters.md"
        ) from problem


def steady(nodes: int, pods: int, events_per_second: int, seed: int = 1) -> Description:
    """A cluster with about so many pods, of which so many come or go each second, without end."""
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
    """The microseconds from one to the next, on average."""
    match = _RATE.fullmatch(rate)
    if match is None or not Fraction(match["count"]):
        raise InvalidInput(f"rate: {rate!r} is no rate", hint="write for example 2/s, 30/m or 1/h")
    return max(int(_SECONDS[match["unit"]] * 1_000_000 / Fraction(match["count"])), 1)


def moment(text: str, where: str) -> int:
    """A duration in microseconds that is not below zero."""
    try:
        found = durations.parse(text) // _MICROSECOND
    except InvalidInput as problem:
        raise InvalidInput(f"{where}: {problem.message}", hint=problem.hint) from None
    if found < 0:
        raise InvalidInput(f"{where}: {text!r} is negative")
    return found


def period(text: str, where: str) -> Range:
    """A duration or a range of them ("30s..5m"), in microseconds."""
    low, high = _ends(text)
    return _range(moment(low, where), moment(high, where), where)


@contextmanager
def _checked(field: str = "") -> Iterator[None]:
    """What msgspec takes for a mistake in the text, and says where it is."""
    try:
        yield
    except KubelendError as problem:
        raise ValueError(f"{field}: {problem}" if field else str(problem)) from problem


def _around(seconds: Fraction) -> str:
    """A range of durations whose mean is this."""
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
        raise InvalidInput(f"{where}: ends below its beginning")
    return Range(low, high)
