"""What a list of measurements says: the few figures that the benchmarks report. Pure."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def seconds_per_call(call: Callable[[], object], calls: int, rounds: int) -> float:
    """The median over rounds of so many calls each, in seconds of this thread's own work.

    For calls that never wait: what else the machine does then spoils some rounds, but not the median.
    """
    return median([_round(call, calls) / calls for _ in range(rounds)])


def calls_within(call: Callable[[], object], seconds: float) -> int:
    """How many calls take at least so long, found by doubling: the first ones are not like the rest."""
    calls = 1
    while _round(call, calls) < seconds:
        calls *= 2
    return calls


def _round(call: Callable[[], object], calls: int) -> float:
    began = time.thread_time()
    for _ in range(calls):
        call()
    return time.thread_time() - began
