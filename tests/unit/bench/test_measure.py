"""The figures of a benchmark: CPU and memory of a process, percentiles, time per call, violations."""

import gc
import math
import os
import subprocess
import sys
import time

import msgspec
import pytest

import make
from kubelend.bench import fixtures, measure
from kubelend.bench.measure import BenchRun, UsageWindow
from kubelend.core.errors import InvalidInput
from kubelend.core.ledger import Ledger
from kubelend.envtest.processes import TemporaryDeployment
from kubelend.stores import factory
from kubelend.wire import conversion

# -- CPU and memory


def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_cpu_is_the_work_within_the_window():
    work(0.1)
    window = UsageWindow(os.getpid())
    work(0.2)
    window.sample()
    assert window.seconds >= 0.15
    found = window.figures()
    assert found["cpu_percent"] * window.seconds == pytest.approx(100 * 0.2, rel=0.5)
    assert found["rss_mb"] > 1


def test_process_that_has_ended_has_no_figures():
    with pytest.raises(FileNotFoundError):
        UsageWindow(2**22 + 1)


HOLDER = """
import mmap
with mmap.mmap(-1, 50 * 2**20) as held:
    held.write(b"x" * (50 * 2**20))
    input("held")
input("freed")
"""
"""A map of its own goes back to the system when it is closed, which freed objects may not."""


def test_memory_is_the_peak_of_all_samples():
    arguments = [sys.executable, "-u", "-c", HOLDER]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(4) == b"held"
        window = UsageWindow(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.read(5) == b"freed"
        most = window.current_rss_mb() + 40
        window.sample()
        assert window.figures()["rss_mb"] > most
        process.communicate(b"\n")


async def test_calls_are_spread_evenly_and_awaited(tmp_path):
    run, started = BenchRun("x", TemporaryDeployment(tmp_path)), []

    async def send(number):
        started.append((number, time.perf_counter()))

    began = time.perf_counter()
    window = await run.send_evenly(os.getpid(), send, count=4, seconds=0.2)
    assert [number for number, _ in started] == [0, 1, 2, 3]
    for number, at in started:
        assert at - began >= number * 0.05
    assert window.seconds >= 0.15


def test_limit_of_open_files_is_checked_first():
    measure.need_open_files(0, "none")
    with pytest.raises(InvalidInput, match="9 connections exceed the limit of open files"):
        measure.need_open_files(2**62, "9 connections")


# -- times


@pytest.mark.parametrize(
    "values, percent, expected",
    [
        (range(100, 0, -1), 50, 50),
        (range(100, 0, -1), 99, 99),
        (range(100, 0, -1), 100, 100),
        (range(100, 0, -1), 0, 1),
        ([3.5], 99, 3.5),
        ([], 50, math.nan),
    ],
    ids=["median", "one is slower", "slowest", "fastest", "one value", "no value"],
)
def test_percentile_is_a_measured_value(values, percent, expected):
    assert measure.percentile(values, percent) == pytest.approx(expected, nan_ok=True)


def test_latencies_are_in_milliseconds():
    assert measure.latency_figures([0.004, 0.0015]) == {"p50_ms": 1.5, "p99_ms": 4.0}


def test_time_per_call_is_cpu_time_and_not_waiting():
    def work_and_wait():
        work(0.004)
        time.sleep(0.004)

    assert measure.cpu_seconds_per_call(work_and_wait) == pytest.approx(0.004, rel=0.5)
    assert gc.isenabled()


# -- violations


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store.db"
    fixtures.fill_store(path, fixtures.make_clusters(5, make.T0, all_open=True), 20, make.T0)
    return str(path)


@pytest.fixture
def responses(store):
    opened = factory.open_readonly(store)
    try:
        ledger = Ledger.restore(opened.load())
    finally:
        opened.close()
    return [response(found) for found in ledger.reservations.values()]


def response(found):
    return msgspec.json.encode(conversion.from_reservation(found))


def test_confirmed_reservations_that_are_missing_or_duplicate_count(store, responses):
    assert len(responses) == 20
    assert measure.count_violations(store, responses) == 0
    lost = response(make.reservation("rsv-lost"))
    assert measure.count_violations(store, [*responses, lost]) == 1
    assert measure.count_violations(store, [*responses, responses[0]]) == 1


def test_overcommitted_clusters_count(tmp_path):
    path = tmp_path / "store.db"
    fixtures.fill_store(path, [make.cluster("cluster-a", "cpu=1m,memory=1Mi")], 20, make.T0)
    assert measure.count_violations(str(path), []) > 0
