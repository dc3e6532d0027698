"""The targets, and the table that compares results with them. Pure.

A target applies to one size of a run: results of other sizes are printed without a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kubelend.kits import columns

Figures = Mapping[str, Any]
"""Figures by key, as printed with `--json`."""


class Target(NamedTuple):
    """One row of the table: a figure, and its limit if it has one."""

    bench: str
    key: str
    description: str
    """Description; may contain other figures as placeholders, such as the size of the run."""
    at_most: float | None = None
    at_least: float | None = None

    def is_met(self, value: float) -> bool:
        """NaN never meets a limit."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    @property
    def limit(self) -> str:
        if self.at_most is not None:
            return f"<= {format_number(self.at_most)}"
        return "" if self.at_least is None else f">= {format_number(self.at_least)}"


class TargetLine(NamedTuple):
    """A target and the measured figures."""

    target: Target
    figures: Figures

    @property
    def value(self) -> float:
        measured: float = self.figures[self.target.key]
        return measured

    @property
    def verdict(self) -> str:
        if not self.target.limit or not self._is_full_size:
            return ""
        return "ok" if self.target.is_met(self.value) else "missed"

    @property
    def cells(self) -> tuple[str, ...]:
        target = self.target
        what = target.description.format_map(self.figures)
        return target.bench, what, format_number(self.value), target.limit, self.verdict

    @property
    def _is_full_size(self) -> bool:
        full = FULL_SIZE[self.target.bench]
        return all(self.figures[key] == size for key, size in full.items())


FULL_SIZE: Mapping[str, Mapping[str, float]] = {
    "decide": {"clusters": 10_000},
    "reserve": {"clusters": 1_000, "connections": 32},
    "advertise": {"clusters": 10_000, "interval": 30},
    "restart": {"reservations": 100_000},
    "agent": {"pods": 3_000, "nodes": 100},
    "deliver": {"count": 200},
    "agents": {"count": 1_000},
    "kube": {"clusters": 100, "connections": 32},
}
"""Sizes to which the limits apply."""

TARGETS = (
    Target("decide", "us_per_decision", "us per decision, {clusters:,} clusters", at_most=100),
    Target(
        "reserve", "reservations_per_s", "durable reservations per second, {connections} clients"
    ),
    Target("reserve", "constant_per_s", "repeated identical requests per second"),
    Target("reserve", "ratio", "ratio of the two rates", at_least=0.5),
    Target("reserve", "healthz_per_s", "/healthz requests per second, for comparison"),
    Target("reserve", "p50_ms", "ms latency of a reservation, p50"),
    Target("reserve", "p99_ms", "ms latency of a reservation, p99"),
    Target("reserve", "violations", "violations found by the audit", at_most=0),
    Target(
        "advertise",
        "cpu_percent",
        "% of a core, {clusters:,} clusters, {interval:g} s, {path}",
        at_most=15,
    ),
    Target("advertise", "rss_mb", "MB of memory, same run", at_most=200),
    Target("restart", "seconds", "s until ready, {reservations:,} reservations", at_most=3),
    Target("agent", "rss_mb", "MB of memory of an agent, {pods:,} pods", at_most=50),
    Target("agent", "cpu_percent", "% of a core, {events_per_s:.0f} pod events per second"),
    Target("deliver", "p50_ms", "ms to the provider, p50 of {count:,} instructions", at_most=50),
    Target("deliver", "p99_ms", "ms to the provider, p99", at_most=250),
    Target("agents", "missed", "instructions missed by {count:,} agents", at_most=0),
    Target("agents", "cpu_percent", "% of a core, broker"),
    Target("agents", "rss_mb", "MB of memory, broker"),
    Target("agents", "p50_ms", "ms to the provider, p50 of {reservations:,} instructions"),
    Target("agents", "p99_ms", "ms to the provider, p99"),
    Target("kube", "reservations_per_s", "reservations per second, {connections} clients"),
    Target("kube", "p50_ms", "ms latency, p50 of {reservations:,} reservations"),
    Target("kube", "p99_ms", "ms latency, p99"),
    Target("kube", "writes_per_reservation", "writes per reservation", at_most=3),
    Target("kube", "idle_writes_per_minute", "writes per minute when idle", at_most=0),
    Target("kube", "start_seconds", "s until ready, {history:,} reservations"),
    Target("kube", "violations", "violations found by the audit", at_most=0),
)

HEADERS = ("BENCH", "WHAT", "MEASURED", "TARGET", "")


def compare_with_targets(results: Mapping[str, Figures]) -> list[TargetLine]:
    """Returns a line per target of the benchmarks that ran."""
    return [
        TargetLine(target, results[target.bench]) for target in TARGETS if target.bench in results
    ]


def missed_targets(lines: Iterable[TargetLine]) -> list[TargetLine]:
    return [line for line in lines if line.verdict == "missed"]


def targets_table(lines: Iterable[TargetLine]) -> str:
    """Formats the lines as a table."""
    return "\n".join(columns.align_columns(HEADERS, [line.cells for line in lines], right=[2]))


def format_number(value: float) -> str:
    """Formats a number with three significant digits: 12,345, 123, 12.3, 0.51."""
    if value >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
