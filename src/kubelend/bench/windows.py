"""What a process costs over the time that counts, by looking at the kernel's figures again and again."""

from __future__ import annotations

from kubelend.bench import processes

SAMPLE_SECONDS = 1.0
"""Between two looks: the memory that counts is the most that was seen."""


class Window:
    """Begins when it is made, and ends with the last sample."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first = self._last = processes.usage(pid)
        self._rss_mb = self._first.rss_mb

    def sample(self) -> None:
        self._last = processes.usage(self._pid)
        self._rss_mb = max(self._rss_mb, self._last.rss_mb)

    @property
    def seconds(self) -> float:
        return self._last.at - self._first.at

    @property
    def cpu_percent(self) -> float:
        """Of one core."""
        return round(self._last.cpu_percent_since(self._first), 2)

    @property
    def rss_mb(self) -> float:
        """The most that was seen, in millions of bytes."""
        return round(self._rss_mb, 1)
