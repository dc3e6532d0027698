"""Metrics of the agent. Broker calls are observed as they end; everything else is read at scrape time.

Names and labels are API: dashboards and alerts depend on them, and docs/metrics.md lists them.
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
from kubelend.agent.health import ComponentHealth
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.inventory import Inventory, Totals
from kubelend.core.resources import Resources

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_DURATION_BUCKETS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)
_MILLICORES_PER_CORE: Final = 1000


class MetricsInput(NamedTuple):
    """What a scrape reads."""

    cluster: str
    inventory: Inventory
    reservations: ReservationCache
    health: ComponentHealth
    is_streaming: Callable[[], bool]
    components: tuple[str, ...]
    """The values of the label `component` of `kubelend_agent_component_healthy`."""
    published_at: Callable[[], datetime | None] = lambda: None
    """When the broker last accepted an advertisement."""


class AgentMetrics:
    """All metrics of one agent, in a registry of their own."""

    def __init__(self, inputs: MetricsInput) -> None:
        self._registry = CollectorRegistry()
        info = Gauge(
            "kubelend_agent_info",
            "Always 1; the labels are the agent's version and its cluster ID",
            ("version", "cluster"),
            registry=self._registry,
        )
        info.labels(kubelend.__version__, inputs.cluster).set(1)
        self._calls = Histogram(
            "kubelend_agent_broker_call_duration_seconds",
            "Duration of broker calls, by call and result: OK or the error code",
            ("call", "code"),
            buckets=_DURATION_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_ScrapeCollector(inputs))
        ProcessCollector(registry=self._registry)

    def observe_call(self, call: str, code: str, seconds: float) -> None:
        """Observe the duration of a broker call."""
        self._calls.labels(call, code).observe(seconds)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)


class _ScrapeCollector(Collector):
    """Gauges whose values are read at scrape time."""

    def __init__(self, inputs: MetricsInput) -> None:
        self._inputs = inputs

    def collect(self) -> Iterator[Metric]:
        totals = self._inputs.inventory.totals()
        yield from self._amounts(totals)
        for what, count in (("nodes", totals.nodes), ("pods", totals.pods)):
            text = f"Number of {what} that the agent counts"
            yield GaugeMetricFamily(f"kubelend_agent_{what}", text, count)
        yield from self._broker_connection()
        yield self._reservations()
        yield self._component_health()

    def _amounts(self, totals: Totals) -> Iterator[Metric]:
        for name, amounts, text in (
            ("capacity", totals.capacity, "Capacity of the cluster's nodes"),
            ("allocatable", totals.allocatable, "Resources available to pods"),
            ("allocated", totals.allocated, "Resources requested by the cluster's own pods"),
            ("pending", totals.pending, "Resources requested by pods that are not scheduled"),
            ("free", totals.free, "Resources free after subtracting reserved ones"),
            ("largest_free", totals.largest, "Largest amount free on a single node"),
        ):
            yield _by_resource(
                f"kubelend_agent_{name}", f"{text}, in cores, bytes or devices", amounts
            )
        held = sum((hold.resources for hold in self._inputs.inventory.holds.values()), Resources())
        yield _by_resource(
            "kubelend_agent_reserved",
            "Resources reserved for other clusters, in cores, bytes or devices",
            held,
        )

    def _broker_connection(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "kubelend_agent_stream_connected",
            "Whether the instruction stream of the broker is connected",
            int(self._inputs.is_streaming()),
        )
        published_at = self._inputs.published_at()
        yield GaugeMetricFamily(
            "kubelend_agent_last_advertisement_timestamp_seconds",
            "Time of the last advertisement that the broker accepted, in seconds since 1970",
            0 if published_at is None else published_at.timestamp(),
        )

    def _reservations(self) -> Metric:
        metric = GaugeMetricFamily(
            "kubelend_agent_reservations",
            "Number of unfinished reservations of this cluster, by its role and their phase",
            labels=("role", "phase"),
        )
        counts: Counter[tuple[str, str]] = Counter()
        for found in self._inputs.reservations.unfinished():
            for role, cluster in (
                ("requester", found.requester_id),
                ("provider", found.target_cluster_id),
            ):
                counts[role, found.status.phase] += cluster == self._inputs.cluster
        for labels, count in sorted((+counts).items()):
            metric.add_metric(labels, count)
        return metric

    def _component_health(self) -> Metric:
        problems = self._inputs.health.errors
        metric = GaugeMetricFamily(
            "kubelend_agent_component_healthy",
            "Whether a component works: 1 healthy, 0 unhealthy",
            labels=("component",),
        )
        for part in self._inputs.components:
            metric.add_metric((part,), part not in problems)
        return metric


def _by_resource(name: str, help: str, amounts: Resources) -> Metric:
    metric = GaugeMetricFamily(name, help, labels=("resource",))
    for resource, amount in {"cpu": 0, "memory": 0, **dict(amounts.items())}.items():
        metric.add_metric(
            (resource,), amount / _MILLICORES_PER_CORE if resource == "cpu" else amount
        )
    return metric
