"""`kubelend dev bench` decide, reserve and restart: decision, throughput and start-up of a broker."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from kubelend.bench import fleets, progress, timings
from kubelend.core import decision
from kubelend.core.decision import Placement
from kubelend.core.errors import KubelendError
from kubelend.core.filters import Question
from kubelend.core.fleet import Fleet
from kubelend.core.models import Cluster, Request

SIZES = (100, 1_000, 10_000, 100_000)
TARGET_SIZE = 10_000

_NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
_REQUESTS = 32
_ROUNDS = 9
_ROUND_SECONDS = 0.03


class Result(msgspec.Struct, frozen=True):
    """Microseconds per decision; the keys are API."""

    clusters: int
    small_us: float
    large_us: float
    us_per_decision: float
    """The maximum of both."""


class Results(Result, frozen=True):
    """Results of several sizes; the top-level figures are those of the target's size, else of the first."""

    sizes: tuple[Result, ...] = ()


def measure_all(sizes: Sequence[int]) -> Results:
    found = tuple(measure(size) for size in sizes)
    chosen = next((one for one in found if one.clusters == TARGET_SIZE), found[0])
    return Results(**msgspec.structs.asdict(chosen), sizes=found)


def measure(clusters: int) -> Result:
    """Measures decisions on small and large requests over one random fleet."""
    progress.say(f"decide: {clusters:,} clusters")
    known = fleets.clusters(clusters, _NOW)
    fleet = _fleet(known)
    small = _microseconds(fleets.small_requests(_REQUESTS), fleet)
    large = _microseconds(fleets.large_requests(_REQUESTS, known, _NOW), fleet)
    progress.done()
    return Result(clusters, round(small, 2), round(large, 2), round(max(small, large), 2))


def _fleet(known: list[Cluster]) -> Fleet:
    fleet = Fleet(len(known))
    for cluster in known:
        fleet.put(cluster, cluster.ceiling.clamped())
    return fleet


def _microseconds(requests: list[Request], fleet: Fleet) -> float:
    questions = [Question(request, _NOW) for request in requests]
    for question in questions:
        if not isinstance(decision.decide(question, fleet), Placement):
            raise KubelendError("a request fits nowhere; the benchmark would measure explanations")

    def decide_all() -> None:
        for question in questions:
            decision.decide(question, fleet)

    calls = timings.calls_within(decide_all, _ROUND_SECONDS)
    seconds = timings.seconds_per_call(decide_all, calls, _ROUNDS)
    return seconds / len(questions) * 1e6
