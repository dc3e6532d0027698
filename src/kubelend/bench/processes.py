"""CPU and memory usage of another process, from /proc."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

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
