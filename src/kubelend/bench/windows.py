"""Samples CPU and memory of a process over a measurement window."""

from __future__ import annotations

from kubelend.bench import processes

SAMPLE_SECONDS = 1.0
"""Interval between samples; the reported memory is the maximum of all samples."""


class UsageWindow:
    """A window that starts with its creation and ends with the last sample."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first = self._last = processes.process_usage(pid)
        self._rss_mb = self._first.rss_mb

    def sample(self) -> None:
        self._last = processes.process_usage(self._pid)
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
