"""What another process costs, as the kernel counts it."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

MEGABYTE = 1_000_000


class Usage(NamedTuple):
    """Up to a moment: processor time in seconds of one core, and memory."""

    at: float
    cpu_seconds: float
    rss_mb: float

    def cpu_percent_since(self, earlier: Usage) -> float:
        """The share of one core that was used in between."""
        return 100 * (self.cpu_seconds - earlier.cpu_seconds) / (self.at - earlier.at)


def usage(pid: int) -> Usage:
    """Of a running process, all its threads together."""
    process = Path("/proc") / str(pid)
    # The name before the last parenthesis may hold anything, spaces too; utime and stime follow it.
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    pages = int((process / "statm").read_text().split()[1])
    return Usage(
        time.perf_counter(),
        sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE,
    )


def allow_many_files() -> int:
    """As many open files as the system lets us have, for us and for what we start; gives the number."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
