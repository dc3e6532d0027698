"""Counters and histograms that are cheap to update and are rendered when scraped.

The classes of prometheus-client take a lock and a few calls for each observation: 1.6 us for a histogram,
five times as much as these. They are written by the event loop's thread alone and read by the rendering
thread; an observation in between shows with the next scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kubelend.broker.families import MetricFamily

LabelValues = tuple[str | int, ...]


class FastCounter(Collector):
    """A counter with all its time series."""

    def __init__(self, family: MetricFamily, known: Iterable[LabelValues] = ()) -> None:
        """The known series start at zero, so that `rate` sees their first increase."""
        self.counts: dict[LabelValues, int] = dict.fromkeys(known, 0)
        self._family = family

    def add(self, *labels: str | int) -> None:
        self.counts[labels] = self.counts.get(labels, 0) + 1

    def collect(self) -> Iterator[Metric]:
        metric = CounterMetricFamily(
            self._family.name, self._family.help, labels=self._family.labels
        )
        for labels, count in self.counts.copy().items():
            metric.add_metric([str(label) for label in labels], count)
        yield metric


class HistogramSeries:
    """One time series of a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, amount: float) -> None:
        self.counts[bisect_left(self.bounds, amount)] += 1
        self.total += amount


class FastHistogram(Collector):
    """A histogram with all its time series."""

    def __init__(self, family: MetricFamily) -> None:
        self._family = family
        self._bounds = [*map(str, family.buckets), "+Inf"]
        self._series: dict[LabelValues, HistogramSeries] = {}

    def series(self, *labels: str | int) -> HistogramSeries:
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = HistogramSeries(self._family.buckets)
        return found

    def collect(self) -> Iterator[Metric]:
        metric = HistogramMetricFamily(
            self._family.name, self._family.help, labels=self._family.labels
        )
        for labels, series in self._series.copy().items():
            total, counts = series.total, accumulate(series.counts.copy())
            buckets = list(zip(self._bounds, counts, strict=True))
            metric.add_metric([str(label) for label in labels], buckets, total)
        yield metric
