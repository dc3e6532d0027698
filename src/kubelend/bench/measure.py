"""The frame of all benchmarks: start, progress, CPU and memory, latencies, and the audit at the end."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from kubelend.core import audit as core_audit
from kubelend.core.errors import InvalidInput, Unavailable
from kubelend.envtest import processes
from kubelend.envtest.processes import BrokerProcess, ChildProcess, TemporaryDeployment
from kubelend.stores import factory
from kubelend.wire import bodies

Figures = dict[str, Any]
"""The result of a benchmark, as printed with `--json`. Its keys are API."""

_MEGABYTE = 1_000_000
_SAMPLE_SECONDS = 1.0
"""Interval between samples; the reported memory is the maximum of all samples."""
_SPARE_FILES = 100
_ROUNDS = 9
_CLEAR_LINE = "\r\x1b[K"

ResultT = TypeVar("ResultT")


class BenchRun:
    """One run of a benchmark: its deployment and its line of progress. Use `run`, which removes both."""

    def __init__(self, name: str, deployment: TemporaryDeployment) -> None:
        self.name = name
        self.deployment = deployment

    def progress(self, text: str) -> None:
        show_progress(f"{self.name}: {text} ...")

    @contextmanager
    def broker(self, *flags: str) -> Iterator[BrokerProcess]:
        """Starts a broker and waits until it is ready."""
        self.progress("starting the broker")
        with self.deployment.broker(*flags) as broker:
            broker.wait_until_ready()
            yield broker

    def watch(self, process: ChildProcess, seconds: float) -> UsageWindow:
        """Samples a process that works without calls from here."""
        window = UsageWindow(process.pid)
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self.progress(f"{seconds - left:.0f} of {seconds:.0f} s measured")
            time.sleep(min(_SAMPLE_SECONDS, left))
            if not process.is_running:
                raise Unavailable(
                    f"the {process.title} exited unexpectedly", hint=process.log_tail()
                )
            window.sample()
        return window

    async def send_evenly(
        self,
        pid: int,
        send: Callable[[int], Coroutine[Any, Any, None]],
        count: int,
        seconds: float,
    ) -> UsageWindow:
        """Starts `count` calls evenly over `seconds`, without waiting for responses (open loop).

        Samples the process that is called until the last call was started; waits for all calls.
        """
        window = UsageWindow(pid)
        begin = sampled = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                due = begin + number * seconds / count
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(send(number))
                if due - sampled >= _SAMPLE_SECONDS:
                    sampled = due
                    window.sample()
                    self.progress(f"{due - begin:.0f} of {seconds:.0f} s measured")
            window.sample()
        return window


@contextmanager
def run(name: str) -> Iterator[BenchRun]:
    """Opens a temporary deployment for a benchmark."""
    with processes.temporary_deployment() as deployment:
        yield BenchRun(name, deployment)
    show_progress("")


def show_progress(text: str) -> None:
    """Replaces the line of progress, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"{_CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)


def run_on_uvloop(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs a coroutine, with objects of earlier benchmarks excluded from garbage collection."""
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def need_open_files(count: int, what: str) -> None:
    """Raises the limit of open files for this process and its children; fails if it is too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < count + _SPARE_FILES:
        raise InvalidInput(f"{what} exceed the limit of open files (`ulimit -Hn`)")


class UsageWindow:
    """CPU and memory of a process with all its threads, from its creation until the last sample."""

    def __init__(self, pid: int) -> None:
        self._process = Path("/proc") / str(pid)
        self._begin = self._end = time.perf_counter()
        self._cpu_before = self._cpu = self._cpu_seconds()
        self._rss_mb = self.current_rss_mb()

    def sample(self) -> None:
        self._end, self._cpu = time.perf_counter(), self._cpu_seconds()
        self._rss_mb = max(self._rss_mb, self.current_rss_mb())

    @property
    def seconds(self) -> float:
        return self._end - self._begin

    def figures(self) -> Figures:
        """CPU in percent of one core, and peak resident memory in MB (10^6 bytes)."""
        cpu = 100 * (self._cpu - self._cpu_before) / self.seconds
        return {"cpu_percent": round(cpu, 2), "rss_mb": round(self._rss_mb, 1)}

    def current_rss_mb(self) -> float:
        pages = int((self._process / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MEGABYTE

    def _cpu_seconds(self) -> float:
        # The name before the last parenthesis may contain spaces; utime and stime follow it.
        ticks = (self._process / "stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def latency_figures(seconds: Sequence[float]) -> Figures:
    """Median and 99th percentile in milliseconds; NaN without values."""
    return {f"p{each}_ms": round(percentile(seconds, each) * 1000, 2) for each in (50, 99)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def cpu_seconds_per_call(call: Callable[[], object]) -> float:
    """Returns the median CPU seconds per call over several rounds of about 30 ms, after a warm-up.

    For calls that never block: other load on the machine affects some rounds, but not the median.
    """
    # With garbage collection, as in a broker; `timeit` would switch it off.
    timer = timeit.Timer(call, setup=gc.enable, timer=time.thread_time)
    calls, _ = timer.autorange()
    calls = max(1, calls // 7)
    return statistics.median(timer.repeat(_ROUNDS, calls)) / calls


def count_violations(store: str, responses: Sequence[bytes]) -> int:
    """Counts violated invariants, and confirmed reservations that are missing or duplicate."""
    ledger, found, _ = factory.audit_store(store)
    promised = {msgspec.json.decode(body, type=bodies.Reservation).id for body in responses}
    lost = promised - ledger.reservations.keys()
    doubled = len(responses) - len(promised)
    return len(found) + len(core_audit.overcommitted_clusters(ledger)) + len(lost) + doubled
