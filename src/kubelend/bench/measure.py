"""Measurement helpers: CPU and memory of a process (from /proc), percentiles, time per call, progress."""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubelend.core import audit as core_audit
from kubelend.stores import audit
from kubelend.wire import bodies

MEGABYTE = 1_000_000


class ProcessUsage(NamedTuple):
    """CPU seconds and resident memory at a moment."""

    at: float
    cpu_seconds: float
    rss_mb: float

    def cpu_percent_since(self, earlier: ProcessUsage) -> float:
        """Returns the CPU usage in percent of one core since an earlier sample."""
        return 100 * (self.cpu_seconds - earlier.cpu_seconds) / (self.at - earlier.at)


def process_usage(pid: int) -> ProcessUsage:
    """Samples a running process with all its threads."""
    process = Path("/proc") / str(pid)
    # The name before the last parenthesis may contain spaces; utime and stime follow it.
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    pages = int((process / "statm").read_text().split()[1])
    return ProcessUsage(
        time.perf_counter(),
        sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE,
    )


def raise_open_files() -> int:
    """Raises the limit of open files for this process and its children; returns it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


_CLEAR_LINE = "\r\x1b[K"


def show_progress(text: str) -> None:
    """Prints the line if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"{_CLEAR_LINE}{text} ...", end="", file=sys.stderr, flush=True)


def clear_progress() -> None:
    """Clears the line."""
    if sys.stderr.isatty():
        print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


SAMPLE_SECONDS = 1.0
"""Interval between samples; the reported memory is the maximum of all samples."""


class UsageWindow:
    """A window that starts with its creation and ends with the last sample."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first = self._last = process_usage(pid)
        self._rss_mb = self._first.rss_mb

    def sample(self) -> None:
        self._last = process_usage(self._pid)
        self._rss_mb = max(self._rss_mb, self._last.rss_mb)

    @property
    def seconds(self) -> float:
        return self._last.at - self._first.at

    @property
    def cpu_percent(self) -> float:
        """CPU usage in percent of one core."""
        return round(self._last.cpu_percent_since(self._first), 2)

    @property
    def rss_mb(self) -> float:
        """Peak resident memory in MB (10^6 bytes)."""
        return round(self._rss_mb, 1)


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


def count_violations(store: str, responses: Sequence[bytes]) -> int:
    """Counts violated invariants, and confirmed reservations that are missing or duplicate."""
    ledger, found, _ = audit.audit_store(store)
    promised = {msgspec.json.decode(body, type=bodies.Reservation).id for body in responses}
    lost = promised - ledger.reservations.keys()
    doubled = len(responses) - len(promised)
    return len(found) + len(core_audit.overcommitted_clusters(ledger)) + len(lost) + doubled
