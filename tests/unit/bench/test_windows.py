"""A process watched for a while: its work, and the most memory that was seen."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from kubelend.bench import measure
from kubelend.bench.measure import UsageWindow


def test_work_within_the_window_counts():
    window = UsageWindow(os.getpid())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    window.sample()
    assert window.seconds >= 0.15
    assert window.cpu_percent * window.seconds == pytest.approx(100 * 0.2, rel=0.5)


HOLDER = """
import mmap
with mmap.mmap(-1, 50 * 2**20) as held:
    held.write(b"x" * (50 * 2**20))
    input("held")
input("freed")
"""
"""A map of its own goes back to the system when it is closed, which freed objects may not."""


@contextmanager
def holder():
    """Another process: what else this one has may come and go at any time."""
    arguments = [sys.executable, "-u", "-c", HOLDER]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.communicate(b"\n")


def test_the_most_memory_that_was_seen_counts():
    with holder() as process:
        assert process.stdout.read(4) == b"held"
        window = UsageWindow(process.pid)
        most = window.rss_mb
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.read(5) == b"freed"
        assert measure.process_usage(process.pid).rss_mb < most - 40
        window.sample()
        assert window.rss_mb == most
