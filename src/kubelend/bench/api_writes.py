"""Counts write requests by the API server's own metrics, independent of the broker's. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import parser

from kubelend.wire import broker_objects, objects

Writes = Counter[str]
"""Number by verb and resource, for example `PATCH reservations/status`."""

_WRITES_METRIC = "apiserver_request_total"
_WRITE_VERBS = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"})
_API_GROUPS = frozenset({broker_objects.GROUP, objects.GROUP, "", "events.k8s.io"})
"""API groups that a broker writes to. Leases, which have their own group, are not counted."""


def count_writes(metrics: str) -> Writes:
    """Returns all writes so far, including rejected ones, which are also work for the server."""
    found: Writes = Counter()
    for labels, value in _write_samples(metrics):
        if labels["verb"] in _WRITE_VERBS and labels["group"] in _API_GROUPS:
            found[_write_name(labels)] += round(value)
    return found


def writes_per_reservation(writes: Writes, reservations: int) -> dict[str, float]:
    """Returns writes per reservation, the largest first."""
    return {name: round(number / reservations, 3) for name, number in writes.most_common()}


def _write_samples(metrics: str) -> Iterator[tuple[Mapping[str, str], float]]:
    # There are tens of thousands of lines, and the parser is slow: filter first.
    lines = [line for line in metrics.splitlines() if line.startswith(f"{_WRITES_METRIC}{{")]
    for family in parser.text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            yield sample.labels, sample.value


def _write_name(labels: Mapping[str, str]) -> str:
    part = f"/{labels['subresource']}" if labels["subresource"] else ""
    return f"{labels['verb']} {labels['resource']}{part}"
