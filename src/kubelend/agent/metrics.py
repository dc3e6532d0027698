"""What the agent tells its monitoring. Calls are counted as they end; all else is read when scraped.

Names and labels are API: dashboards and alerts are written against them, and docs/metrics.md lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final, NamedTuple

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import kubelend
from kubelend.agent.reservations import Reservations
from kubelend.agent.standing import Standing
from kubelend.core.inventory import Inventory, Totals
from kubelend.core.resources import Resources

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_CORES: Final = 1000


class Watched(NamedTuple):
    """What a scrape looks at."""

    cluster: str
    inventory: Inventory
    reservations: Reservations
    standing: Standing
    is_streaming: Callable[[], bool]
    parts: tuple[str, ...]
    """The parts of which `kubelend_agent_part_up` speaks."""
    published_at: Callable[[], datetime | None] = lambda: None
    """When the broker last took an advertisement."""


class Metrics:
    """All metrics of one agent, in a registry of their own."""

    def __init__(self, watched: Watched) -> None:
        self._registry = CollectorRegistry()
        info = Gauge(
            "kubelend_agent_info",
            "Always 1; the labels say which version runs, for which cluster",
            ("version", "cluster"),
            registry=self._registry,
        )
        info.labels(kubelend.__version__, watched.cluster).set(1)
        self._calls = Histogram(
            "kubelend_agent_broker_call_seconds",
            "Calls of the broker, by what for, and OK or the code of the error",
            ("call", "code"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Present(watched))
        ProcessCollector(registry=self._registry)

    def called(self, call: str, code: str, seconds: float) -> None:
        """A call of the broker has ended."""
        self._calls.labels(call, code).observe(seconds)

    def render(self) -> bytes:
        """Everything, in the text format of Prometheus."""
        return generate_latest(self._registry)


class _Present(Collector):
    """What is so at the moment of the scrape."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        totals = self._watched.inventory.totals()
        yield from self._amounts(totals)
        yield _gauge("kubelend_agent_nodes", "Own nodes that count", totals.nodes)
        yield _gauge("kubelend_agent_pods", "Pods that count", totals.pods)
        yield from self._conversation()
        yield self._reservations()
        yield self._parts()

    def _amounts(self, totals: Totals) -> Iterator[Metric]:
        for name, amounts, what in (
            ("capacity", totals.capacity, "What the own nodes have"),
            ("allocatable", totals.allocatable, "What the own nodes can give to pods"),
            ("allocated", totals.allocated, "What is in use, beyond what is held for others"),
            ("pending", totals.pending, "What pods ask for that are not scheduled"),
            ("free", totals.free, "What is free, with all that is held for others set aside"),
            ("largest", totals.largest, "The most that is free on one node, of each by itself"),
        ):
            yield _by_resource(
                f"kubelend_agent_{name}", f"{what}, in cores, bytes or devices", amounts
            )
        held = sum((hold.resources for hold in self._watched.inventory.holds.values()), Resources())
        yield _by_resource(
            "kubelend_agent_held", "What is held for others, in the same units", held
        )

    def _conversation(self) -> Iterator[Metric]:
        yield _gauge(
            "kubelend_agent_stream_up",
            "1 while the broker can push instructions",
            int(self._watched.is_streaming()),
        )
        published_at = self._watched.published_at()
        yield _gauge(
            "kubelend_agent_last_advertisement_timestamp_seconds",
            "When the broker last took an advertisement; 0 if it never did",
            0 if published_at is None else published_at.timestamp(),
        )

    def _reservations(self) -> Metric:
        metric = GaugeMetricFamily(
            "kubelend_agent_reservations",
            "Reservations of this cluster that are not over, by its role and their phase",
            labels=("role", "phase"),
        )
        for (role, phase), count in sorted((+self._by_role()).items()):
            metric.add_metric((role, phase), count)
        return metric

    def _by_role(self) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        for found in self._watched.reservations.open():
            for role, cluster in (
                ("requester", found.requester_id),
                ("provider", found.target_cluster_id),
            ):
                counts[role, found.status.phase] += cluster == self._watched.cluster
        return counts

    def _parts(self) -> Metric:
        problems = self._watched.standing.problems
        metric = GaugeMetricFamily(
            "kubelend_agent_part_up",
            "0 while something keeps a part from its work",
            labels=("part",),
        )
        for part in self._watched.parts:
            metric.add_metric((part,), part not in problems)
        return metric


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)


def _by_resource(name: str, help: str, amounts: Resources) -> Metric:
    metric = GaugeMetricFamily(name, help, labels=("resource",))
    for resource, amount in {"cpu": 0, "memory": 0, **dict(amounts.items())}.items():
        metric.add_metric((resource,), amount / _CORES if resource == "cpu" else amount)
    return metric
