"""Every metric of the broker, once: its name, kind, labels, and the sentence that explains it.

`broker.metrics` and `broker.gauges` fill them; the table in docs/metrics.md is made from them. Names and
labels are API: dashboards and alerts are written against them.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

MICROSECONDS: Final = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
"""Decisions: 100 us over 10,000 clusters is what is promised, so most of the steps are around that."""

MILLISECONDS: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""What waits for a disk or a network."""

SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Family(NamedTuple):
    """One metric with all its series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


BUILD_INFO: Final = Family(
    "kubelend_build_info", "gauge", ("version",), "Always 1; the label says which version runs"
)
STORE_UP: Final = Family(
    "kubelend_store_up",
    "gauge",
    (),
    "1 while the store takes writes, 0 while the broker is unready",
)
CERTIFICATE_EXPIRY: Final = Family(
    "kubelend_certificate_expiry_timestamp_seconds",
    "gauge",
    ("name",),
    "When a certificate that the broker uses ends, in seconds since 1970",
)
STREAMS: Final = Family("kubelend_streams", "gauge", (), "Open streams of instructions to clusters")
CONNECTIONS: Final = Family(
    "kubelend_connections",
    "gauge",
    (),
    "Open connections to the TLS ports, with those whose handshake has not finished",
)
REFUSED_CONNECTIONS: Final = Family(
    "kubelend_refused_connections_total",
    "counter",
    ("reason",),
    "Connections closed because of a limit: TooManyConnections, TooManyOfCaller, TooManyHandshakes, ...",
)

DECISION_SECONDS: Final = Family(
    "kubelend_decision_seconds",
    "histogram",
    ("outcome",),
    "Time to decide a request, without its commit; outcome is placed, queued or refused",
    MICROSECONDS,
)
CONFLICTS: Final = Family(
    "kubelend_conflicts_total",
    "counter",
    ("reason",),
    "Requests refused because no cluster fits, by what kept most clusters from it",
)
COMMIT_SECONDS: Final = Family(
    "kubelend_commit_seconds",
    "histogram",
    (),
    "Time until a group of changes was durable",
    MILLISECONDS,
)
COMMIT_CHANGES: Final = Family(
    "kubelend_commit_changes", "histogram", (), "Changes that became durable in one group", SIZES
)
FINISHED: Final = Family(
    "kubelend_reservations_finished_total",
    "counter",
    ("phase", "reason"),
    "Reservations that ended, by final phase and why",
)

RESERVATIONS: Final = Family(
    "kubelend_reservations",
    "gauge",
    ("phase", "reason"),
    "Reservations at hand, by phase and why; those finished long ago are archived and not counted",
)
WAITING: Final = Family("kubelend_waiting_requests", "gauge", (), "Requests that wait for capacity")
CLUSTERS: Final = Family(
    "kubelend_clusters",
    "gauge",
    ("state",),
    "Known clusters; state is active, cordoned or stale, and a stale one counts only as that",
)
OVERCOMMITTED: Final = Family(
    "kubelend_clusters_overcommitted",
    "gauge",
    (),
    "Clusters whose own pods have grown into what they had promised",
)
CLUSTER_ACTIVE: Final = Family(
    "kubelend_cluster_active",
    "gauge",
    ("cluster",),
    "1 while the cluster's advertisement is believed, 0 once it is stale",
)
CLUSTER_CERTIFICATE: Final = Family(
    "kubelend_cluster_certificate_expiry_timestamp_seconds",
    "gauge",
    ("cluster",),
    "When the certificate ends that the cluster last advertised with, in seconds since 1970",
)
CLUSTER_CAPACITY: Final = Family(
    "kubelend_cluster_capacity",
    "gauge",
    ("cluster", "resource"),
    "What the cluster has, in cores, bytes or devices",
)
CLUSTER_ALLOCATABLE: Final = Family(
    "kubelend_cluster_allocatable",
    "gauge",
    ("cluster", "resource"),
    "What the cluster can give to pods, in cores, bytes or devices",
)
CLUSTER_RESERVED: Final = Family(
    "kubelend_cluster_reserved",
    "gauge",
    ("cluster", "resource"),
    "What the cluster lends: the sum of its live reservations, in cores, bytes or devices",
)
CLUSTER_AVAILABLE: Final = Family(
    "kubelend_cluster_available",
    "gauge",
    ("cluster", "resource"),
    "What the cluster could still lend, in cores, bytes or devices; never below zero",
)

HTTP_REQUESTS: Final = Family(
    "kubelend_http_requests_total",
    "counter",
    ("route", "method", "code"),
    "Calls answered, by name of the route and HTTP status; 499 for a client that did not wait",
)
HTTP_SECONDS: Final = Family(
    "kubelend_http_request_seconds",
    "histogram",
    ("route",),
    "Time from a call's headers to its answer; for a stream, how long it was open",
    MILLISECONDS,
)
REFUSED_CALLS: Final = Family(
    "kubelend_refused_calls_total",
    "counter",
    ("route", "code"),
    "Calls answered with an error, by the code in the answer: Forbidden, RateLimited, ...",
)

ALL: Final = (
    *(BUILD_INFO, STORE_UP, CERTIFICATE_EXPIRY),
    *(DECISION_SECONDS, CONFLICTS, COMMIT_SECONDS, COMMIT_CHANGES),
    *(RESERVATIONS, FINISHED, WAITING),
    *(CLUSTERS, OVERCOMMITTED, CLUSTER_ACTIVE, CLUSTER_CERTIFICATE),
    *(CLUSTER_CAPACITY, CLUSTER_ALLOCATABLE, CLUSTER_RESERVED, CLUSTER_AVAILABLE),
    *(HTTP_REQUESTS, HTTP_SECONDS, REFUSED_CALLS, STREAMS),
    *(CONNECTIONS, REFUSED_CONNECTIONS),
)


def table() -> str:
    """All of them as a Markdown table, for docs/metrics.md."""
    rows = ["| metric | kind | labels | what it says |", "| --- | --- | --- | --- |"]
    for family in ALL:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows) + "\n"
