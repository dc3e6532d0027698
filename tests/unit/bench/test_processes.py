"""The kernel's figures of a process."""

import os
import time

import pytest

from kubelend.bench import measure
from kubelend.bench.measure import ProcessUsage


def test_work_of_a_process_is_seen():
    before = measure.process_usage(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = measure.process_usage(os.getpid())
    assert after.cpu_seconds - before.cpu_seconds >= 0.05
    assert after.rss_mb > 1


def test_the_share_of_a_core_is_work_over_time():
    assert ProcessUsage(14.0, 3.0, 1.0).cpu_percent_since(ProcessUsage(10.0, 1.0, 1.0)) == 50


def test_a_process_that_is_gone_has_no_figures():
    with pytest.raises(FileNotFoundError):
        measure.process_usage(2**22 + 1)
