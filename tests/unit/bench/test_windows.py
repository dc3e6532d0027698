"""A process watched for a while: its work, and the most memory that was seen."""

import mmap
import os
import time

import pytest

from kubelend.bench import processes
from kubelend.bench.windows import Window

LARGE = 50 * processes.MEGABYTE


def test_work_within_the_window_counts():
    window = Window(os.getpid())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    window.sample()
    assert window.seconds >= 0.15
    assert window.cpu_percent * window.seconds == pytest.approx(100 * 0.2, rel=0.5)


def test_the_most_memory_that_was_seen_counts():
    window = Window(os.getpid())
    before = window.rss_mb
    # A map of its own goes back to the system when it is closed, which freed objects may not.
    with mmap.mmap(-1, LARGE) as held:
        held.write(b"x" * LARGE)
        window.sample()
    assert processes.usage(os.getpid()).rss_mb < before + 25
    window.sample()
    assert window.rss_mb > before + 40
