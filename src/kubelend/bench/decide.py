"""`kubelend dev bench` decide, reserve and restart: decision, throughput and start-up of a broker."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from kubelend.bench import fleets, progress, timings
from kubelend.core import decision
from kubelend.core.decision import Placement
from kubelend.core.errors import KubelendError
from kubelend.core.filters import PlacementQuery
from kubelend.core.fleet import Fleet
from kubelend.core.models import Cluster, Request

DECIDE_SIZES = (100, 1_000, 10_000, 100_000)
DECIDE_TARGET_SIZE = 10_000

_NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
_REQUEST_COUNT = 32
_ROUNDS = 9
_ROUND_SECONDS = 0.03


class DecideResult(msgspec.Struct, frozen=True):
    """Microseconds per decision; the keys are API."""

    clusters: int
    small_us: float
    large_us: float
    us_per_decision: float
    """The maximum of both."""


class DecideResults(DecideResult, frozen=True):
    """Results of several sizes; the top-level figures are those of the target's size, else of the first."""

    sizes: tuple[DecideResult, ...] = ()


def measure_decide_sizes(sizes: Sequence[int]) -> DecideResults:
    found = tuple(measure_decide(size) for size in sizes)
    chosen = next((one for one in found if one.clusters == DECIDE_TARGET_SIZE), found[0])
    return DecideResults(**msgspec.structs.asdict(chosen), sizes=found)


def measure_decide(clusters: int) -> DecideResult:
    """Measures decisions on small and large requests over one random fleet."""
    progress.show_progress(f"decide: {clusters:,} clusters")
    known = fleets.make_clusters(clusters, _NOW)
    fleet = _make_fleet(known)
    small = _decision_microseconds(fleets.small_requests(_REQUEST_COUNT), fleet)
    large = _decision_microseconds(fleets.large_requests(_REQUEST_COUNT, known, _NOW), fleet)
    progress.clear_progress()
    return DecideResult(clusters, round(small, 2), round(large, 2), round(max(small, large), 2))


def _make_fleet(known: list[Cluster]) -> Fleet:
    fleet = Fleet(len(known))
    for cluster in known:
        fleet.put(cluster, cluster.ceiling.clamped())
    return fleet


def _decision_microseconds(requests: list[Request], fleet: Fleet) -> float:
    questions = [PlacementQuery(request, _NOW) for request in requests]
    for question in questions:
        if not isinstance(decision.decide_placement(question, fleet), Placement):
            raise KubelendError("a request fits nowhere; the benchmark would measure explanations")

    def decide_all() -> None:
        for question in questions:
            decision.decide_placement(question, fleet)

    calls = timings.calls_within(decide_all, _ROUND_SECONDS)
    seconds = timings.seconds_per_call(decide_all, calls, _ROUNDS)
    return seconds / len(questions) * 1e6
