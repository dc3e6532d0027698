"""Gauges of the ledger: copied in the event loop, rendered as text in another thread.

`fleet_snapshot` copies references to frozen records, which is fast for any number of clusters.
`fleet_metrics_text` writes the text format itself: the objects of prometheus-client cost ten times as much,
and hold the interpreter lock for all that time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from operator import attrgetter
from typing import Final, NamedTuple

from kubelend.broker import families
from kubelend.broker.families import MetricFamily
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import Advertisement, Cluster
from kubelend.core.resources import Resources


class FleetSnapshot(NamedTuple):
    """The part of the ledger that the gauges need, at a point in time. Immutable."""

    now: datetime
    clusters: list[Cluster]
    reserved: list[Resources]
    """Reserved resources of each cluster, in the same order."""
    reservation_counts: dict[tuple[Phase, Reason], int]
    pending_requests: int


def fleet_snapshot(ledger: Ledger, now: datetime) -> FleetSnapshot:
    """Must be called in the event loop."""
    return FleetSnapshot(
        now,
        list(ledger.clusters.values()),
        list(map(ledger.reserved, ledger.clusters)),
        dict(ledger.phase_counts),
        ledger.waiting_count,
    )


def fleet_metrics_text(snapshot: FleetSnapshot) -> list[bytes]:
    """Returns the snapshot in the Prometheus text format, in chunks. May run in any thread."""
    fleet = _FleetText()
    for number, (cluster, reserved) in enumerate(
        zip(snapshot.clusters, snapshot.reserved, strict=True), start=1
    ):
        fleet.add(cluster, reserved, snapshot.now)
        if number % CLUSTERS_PER_CHUNK == 0:
            fleet.encode_lines()
            time.sleep(CHUNK_PAUSE)
    return [*_totals_text(snapshot, fleet), *fleet.chunks()]


CLUSTERS_PER_CHUNK: Final = 50
CHUNK_PAUSE: Final = 0.0001
"""The thread sleeps after this many clusters, so that the event loop waits about one millisecond for the
interpreter lock, and not five."""

_BASE_UNIT_RESOURCES: Final = tuple(
    (name, attrgetter(name)) for name in ("memory", "gpu", "storage")
)
"""The named resources whose unit is the base unit already."""

_CLUSTER_STATES: Final = ("active", "cordoned", "stale")
_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


_ResourceRow = tuple[str, float, float, float, float]
"""A resource and, in base units: capacity, allocatable, reserved, free (may be negative)."""


class _FleetText:
    """Collects the lines of all clusters by metric, as the format requires."""

    def __init__(self) -> None:
        self.states = Counter(dict.fromkeys(_CLUSTER_STATES, 0))
        self.overcommitted = 0
        self._active: list[str] = []
        self._certificate: list[str] = []
        self._capacity: list[str] = []
        self._allocatable: list[str] = []
        self._reserved: list[str] = []
        self._available: list[str] = []
        self._families = (
            (families.CLUSTER_ACTIVE, self._active),
            (families.CLUSTER_CERTIFICATE_EXPIRY, self._certificate),
            (families.CLUSTER_CAPACITY, self._capacity),
            (families.CLUSTER_ALLOCATABLE, self._allocatable),
            (families.CLUSTER_RESERVED, self._reserved),
            (families.CLUSTER_AVAILABLE, self._available),
        )
        self._chunks = {family: [_metric_header(family)] for family, _ in self._families}

    def add(self, cluster: Cluster, reserved: Resources, now: datetime) -> None:
        stale = cluster.is_stale(now)
        self.states["stale" if stale else "active" if cluster.cordon is None else "cordoned"] += 1
        label = f'cluster="{cluster.id.translate(_LABEL_ESCAPES)}"'
        self._active.append(f"kubelend_cluster_active{{{label}}} {int(not stale)}\n")
        if cluster.certificate_until is not None:
            name, until = (
                families.CLUSTER_CERTIFICATE_EXPIRY.name,
                cluster.certificate_until.timestamp(),
            )
            self._certificate.append(f"{name}{{{label}}} {until}\n")
        overcommitted = False
        for resource, capacity, allocatable, lent, free in _resource_rows(cluster, reserved):
            labels = f'{{{label},resource="{resource}"}}'
            self._capacity.append(f"kubelend_cluster_capacity{labels} {capacity}\n")
            self._allocatable.append(f"kubelend_cluster_allocatable{labels} {allocatable}\n")
            self._reserved.append(f"kubelend_cluster_reserved{labels} {lent}\n")
            self._available.append(f"kubelend_cluster_available{labels} {max(free, 0)}\n")
            overcommitted = overcommitted or free < 0
        self.overcommitted += overcommitted

    def encode_lines(self) -> None:
        """Encodes lines in small steps: a single step would hold the interpreter lock for too long."""
        for family, lines in self._families:
            self._chunks[family].append("".join(lines).encode())
            lines.clear()

    def chunks(self) -> Iterator[bytes]:
        self.encode_lines()
        for parts in self._chunks.values():
            yield from parts


def _resource_rows(cluster: Cluster, reserved: Resources) -> Iterator[_ResourceRow]:
    """Yields CPU and memory always, and every other resource that the cluster has or lends."""
    offer = cluster.advertisement
    capacity, allocatable, allocated = offer.capacity, offer.allocatable, offer.allocated
    has, most, lent = capacity.cpu, allocatable.cpu, reserved.cpu
    yield "cpu", has / 1000, most / 1000, lent / 1000, (most - allocated.cpu - lent) / 1000
    for name, of in _BASE_UNIT_RESOURCES:
        has, most, lent = of(capacity), of(allocatable), of(reserved)
        if has or most or lent or name == "memory":
            yield name, has, most, lent, most - of(allocated) - lent
    if capacity.extended or allocatable.extended or reserved.extended:
        yield from _extended_rows(offer, reserved)


def _extended_rows(offer: Advertisement, reserved: Resources) -> Iterator[_ResourceRow]:
    parts = offer.capacity, offer.allocatable, reserved
    for name in sorted({name for part in parts for name in part.extended}):
        has, most, lent = (part.amount(name) for part in parts)
        yield name, has, most, lent, most - offer.allocated.amount(name) - lent


def _totals_text(snapshot: FleetSnapshot, fleet: _FleetText) -> Iterator[bytes]:
    by_phase = {
        (str(phase), str(why)): count for (phase, why), count in snapshot.reservation_counts.items()
    }
    yield _series_text(families.RESERVATIONS, by_phase.items())
    yield _series_text(families.PENDING_REQUESTS, [((), snapshot.pending_requests)])
    yield _series_text(families.CLUSTERS, [((state,), n) for state, n in fleet.states.items()])
    yield _series_text(families.CLUSTERS_OVERCOMMITTED, [((), fleet.overcommitted)])


def _series_text(family: MetricFamily, series: Iterable[tuple[tuple[str, ...], int]]) -> bytes:
    lines = [_metric_header(family).decode()]
    for values, number in series:
        pairs = zip(family.labels, values, strict=True)
        labels = ",".join(f'{name}="{value}"' for name, value in pairs)
        lines.append(
            f"{family.name}{{{labels}}} {number}\n" if labels else f"{family.name} {number}\n"
        )
    return "".join(lines).encode()


def _metric_header(family: MetricFamily) -> bytes:
    return f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n".encode()
