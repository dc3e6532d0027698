"""Definitions of all metrics of the broker: name, type, labels and help text.

The table in docs/metrics.md is generated from them. Names and labels are API: dashboards and alerts depend
on them.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

DECISION_BUCKETS: Final = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
"""Histogram buckets for placement decisions: the target is 100 us over 10,000 clusters."""

LATENCY_BUCKETS: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Histogram buckets for disk and network latencies."""

SIZE_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class MetricFamily(NamedTuple):
    """One metric with all its time series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


BUILD_INFO: Final = MetricFamily(
    "kubelend_build_info", "gauge", ("version",), "Version of the broker; the value is always 1"
)
STORE_UP: Final = MetricFamily(
    "kubelend_store_up",
    "gauge",
    (),
    "Whether the store accepts writes (1) or the broker is not ready (0)",
)
CERTIFICATE_EXPIRY: Final = MetricFamily(
    "kubelend_certificate_expiry_timestamp_seconds",
    "gauge",
    ("name",),
    "Expiry time of a certificate that the broker uses, as a Unix timestamp",
)
OPEN_STREAMS: Final = MetricFamily(
    "kubelend_open_streams", "gauge", (), "Number of open instruction streams"
)
OPEN_CONNECTIONS: Final = MetricFamily(
    "kubelend_open_connections",
    "gauge",
    (),
    "Number of open connections to the TLS ports, including unfinished handshakes",
)
CONNECTIONS_REJECTED: Final = MetricFamily(
    "kubelend_connections_rejected_total",
    "counter",
    ("reason",),
    "Number of connections closed because of a limit: TooManyConnections, TooManyOfCaller, ...",
)

PLACEMENT_DURATION: Final = MetricFamily(
    "kubelend_placement_duration_seconds",
    "histogram",
    ("outcome",),
    "Duration of placement decisions, without the commit; outcome is placed, queued or rejected",
    DECISION_BUCKETS,
)
PLACEMENT_FAILURES: Final = MetricFamily(
    "kubelend_placement_failures_total",
    "counter",
    ("reason",),
    "Number of requests rejected because no cluster fits, by the most frequent rejection reason",
)
STORE_COMMIT_DURATION: Final = MetricFamily(
    "kubelend_store_commit_duration_seconds",
    "histogram",
    (),
    "Duration of group commits to the store, until the changes are durable",
    LATENCY_BUCKETS,
)
STORE_COMMIT_CHANGES: Final = MetricFamily(
    "kubelend_store_commit_changes",
    "histogram",
    (),
    "Number of changes per group commit",
    SIZE_BUCKETS,
)
RESERVATIONS_FINISHED: Final = MetricFamily(
    "kubelend_reservations_finished_total",
    "counter",
    ("phase", "reason"),
    "Number of reservations that ended, by final phase and reason",
)

RESERVATIONS: Final = MetricFamily(
    "kubelend_reservations",
    "gauge",
    ("phase", "reason"),
    "Number of reservations by phase and reason, without archived ones",
)
PENDING_REQUESTS: Final = MetricFamily(
    "kubelend_pending_requests", "gauge", (), "Number of requests waiting for capacity"
)
CLUSTERS: Final = MetricFamily(
    "kubelend_clusters",
    "gauge",
    ("state",),
    "Number of known clusters; state is active, cordoned or stale (a stale cluster counts only as stale)",
)
CLUSTERS_OVERCOMMITTED: Final = MetricFamily(
    "kubelend_clusters_overcommitted",
    "gauge",
    (),
    "Number of clusters whose own pods use resources that are reserved for others",
)
CLUSTER_ACTIVE: Final = MetricFamily(
    "kubelend_cluster_active",
    "gauge",
    ("cluster",),
    "Whether the cluster's advertisement is current (1) or stale (0)",
)
CLUSTER_CERTIFICATE_EXPIRY: Final = MetricFamily(
    "kubelend_cluster_certificate_expiry_timestamp_seconds",
    "gauge",
    ("cluster",),
    "Expiry time of the certificate that the cluster last advertised with, as a Unix timestamp",
)
CLUSTER_CAPACITY: Final = MetricFamily(
    "kubelend_cluster_capacity",
    "gauge",
    ("cluster", "resource"),
    "Capacity of the cluster, in cores, bytes or devices",
)
CLUSTER_ALLOCATABLE: Final = MetricFamily(
    "kubelend_cluster_allocatable",
    "gauge",
    ("cluster", "resource"),
    "Allocatable resources of the cluster, in cores, bytes or devices",
)
CLUSTER_RESERVED: Final = MetricFamily(
    "kubelend_cluster_reserved",
    "gauge",
    ("cluster", "resource"),
    "Resources that live reservations hold in the cluster, in cores, bytes or devices",
)
CLUSTER_AVAILABLE: Final = MetricFamily(
    "kubelend_cluster_available",
    "gauge",
    ("cluster", "resource"),
    "Resources that can still be reserved in the cluster, in cores, bytes or devices; never below zero",
)

HTTP_REQUESTS: Final = MetricFamily(
    "kubelend_http_requests_total",
    "counter",
    ("route", "method", "code"),
    "Number of HTTP requests by route and status code; 499 if the client disconnected first",
)
HTTP_REQUEST_DURATION: Final = MetricFamily(
    "kubelend_http_request_duration_seconds",
    "histogram",
    ("route",),
    "Duration of HTTP requests from headers to response; for streams, how long they were open",
    LATENCY_BUCKETS,
)
HTTP_REQUESTS_REJECTED: Final = MetricFamily(
    "kubelend_http_requests_rejected_total",
    "counter",
    ("route", "code"),
    "Number of HTTP requests answered with an error, by error code: Forbidden, RateLimited, ...",
)

ALL_METRICS: Final = (
    *(BUILD_INFO, STORE_UP, CERTIFICATE_EXPIRY),
    *(PLACEMENT_DURATION, PLACEMENT_FAILURES, STORE_COMMIT_DURATION, STORE_COMMIT_CHANGES),
    *(RESERVATIONS, RESERVATIONS_FINISHED, PENDING_REQUESTS),
    *(CLUSTERS, CLUSTERS_OVERCOMMITTED, CLUSTER_ACTIVE, CLUSTER_CERTIFICATE_EXPIRY),
    *(CLUSTER_CAPACITY, CLUSTER_ALLOCATABLE, CLUSTER_RESERVED, CLUSTER_AVAILABLE),
    *(HTTP_REQUESTS, HTTP_REQUEST_DURATION, HTTP_REQUESTS_REJECTED, OPEN_STREAMS),
    *(OPEN_CONNECTIONS, CONNECTIONS_REJECTED),
)


def metrics_table() -> str:
    """Returns all metrics as a Markdown table for docs/metrics.md."""
    rows = ["| metric | kind | labels | description |", "| --- | --- | --- | --- |"]
    for family in ALL_METRICS:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows) + "\n"
