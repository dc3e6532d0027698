"""Measurement helpers of the benchmarks: statistics, CPU timing, process usage, progress output and audit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def seconds_per_call(call: Callable[[], object], calls: int, rounds: int) -> float:
    """Returns the median CPU seconds per call over several rounds.

    For calls that never block: other load on the machine affects some rounds, but not the median.
    """
    return median([_cpu_seconds(call, calls) / calls for _ in range(rounds)])


def calls_within(call: Callable[[], object], seconds: float) -> int:
    """Returns how many calls take at least `seconds`, found by doubling; also warms up."""
    calls = 1
    while _cpu_seconds(call, calls) < seconds:
        calls *= 2
    return calls


def _cpu_seconds(call: Callable[[], object], calls: int) -> float:
    began = time.thread_time()
    for _ in range(calls):
        call()
    return time.thread_time() - began
