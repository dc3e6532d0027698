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
from kubelend.broker.families import Family
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
    tally: dict[tuple[Phase, Reason], int]
    waiting: int


def take(ledger: Ledger, now: datetime) -> FleetSnapshot:
    """Must be called in the event loop."""
    return FleetSnapshot(
        now,
        list(ledger.clusters.values()),
        list(map(ledger.reserved, ledger.clusters)),
        dict(ledger.tally),
        ledger.waiting_count,
    )


def text(snapshot: FleetSnapshot) -> list[bytes]:
    """Returns the snapshot in the Prometheus text format, in chunks. May run in any thread."""
    fleet = _Fleet()
    for number, (cluster, reserved) in enumerate(
        zip(snapshot.clusters, snapshot.reserved, strict=True), start=1
    ):
        fleet.add(cluster, reserved, snapshot.now)
        if number % CHUNK == 0:
            fleet.pack()
            time.sleep(PAUSE)
    return [*_sums(snapshot, fleet), *fleet.packed()]


CHUNK: Final = 50
PAUSE: Final = 0.0001
"""The thread sleeps after this many clusters, so that the event loop waits about one millisecond for the
interpreter lock, and not five."""

_WHOLE: Final = tuple((name, attrgetter(name)) for name in ("memory", "gpu", "storage"))
"""The named resources whose unit is the base unit already."""

_STATES: Final = ("active", "cordoned", "stale")
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


_Row = tuple[str, float, float, float, float]
"""A resource and, in base units: capacity, allocatable, reserved, free (may be negative)."""


class _Fleet:
    """Collects the lines of all clusters by metric, as the format requires."""

    def __init__(self) -> None:
        self.states = Counter(dict.fromkeys(_STATES, 0))
        self.overcommitted = 0
        self._active: list[str] = []
        self._certificate: list[str] = []
        self._capacity: list[str] = []
        self._allocatable: list[str] = []
        self._reserved: list[str] = []
        self._available: list[str] = []
        self._families = (
            (families.CLUSTER_ACTIVE, self._active),
            (families.CLUSTER_CERTIFICATE, self._certificate),
            (families.CLUSTER_CAPACITY, self._capacity),
            (families.CLUSTER_ALLOCATABLE, self._allocatable),
            (families.CLUSTER_RESERVED, self._reserved),
            (families.CLUSTER_AVAILABLE, self._available),
        )
        self._packed = {family: [_header(family)] for family, _ in self._families}

    def add(self, cluster: Cluster, reserved: Resources, now: datetime) -> None:
        stale = cluster.is_stale(now)
        self.states["stale" if stale else "active" if cluster.cordon is None else "cordoned"] += 1
        label = f'cluster="{cluster.id.translate(_ESCAPES)}"'
        self._active.append(f"kubelend_cluster_active{{{label}}} {int(not stale)}\n")
        if cluster.certificate_until is not None:
            name, until = families.CLUSTER_CERTIFICATE.name, cluster.certificate_until.timestamp()
            self._certificate.append(f"{name}{{{label}}} {until}\n")
        overcommitted = False
        for resource, capacity, allocatable, lent, free in _rows(cluster, reserved):
            labels = f'{{{label},resource="{resource}"}}'
            self._capacity.append(f"kubelend_cluster_capacity{labels} {capacity}\n")
            self._allocatable.append(f"kubelend_cluster_allocatable{labels} {allocatable}\n")
            self._reserved.append(f"kubelend_cluster_reserved{labels} {lent}\n")
            self._available.append(f"kubelend_cluster_available{labels} {max(free, 0)}\n")
            overcommitted = overcommitted or free < 0
        self.overcommitted += overcommitted

    def pack(self) -> None:
        """Encodes lines in small steps: a single step would hold the interpreter lock for too long."""
        for family, lines in self._families:
            self._packed[family].append("".join(lines).encode())
            lines.clear()

    def packed(self) -> Iterator[bytes]:
        self.pack()
        for parts in self._packed.values():
            yield from parts


def _rows(cluster: Cluster, reserved: Resources) -> Iterator[_Row]:
    """Yields CPU and memory always, and every other resource that the cluster has or lends."""
    offer = cluster.advertisement
    capacity, allocatable, allocated = offer.capacity, offer.allocatable, offer.allocated
    has, most, lent = capacity.cpu, allocatable.cpu, reserved.cpu
    yield "cpu", has / 1000, most / 1000, lent / 1000, (most - allocated.cpu - lent) / 1000
    for name, of in _WHOLE:
        has, most, lent = of(capacity), of(allocatable), of(reserved)
        if has or most or lent or name == "memory":
            yield name, has, most, lent, most - of(allocated) - lent
    if capacity.extended or allocatable.extended or reserved.extended:
        yield from _extended(offer, reserved)


def _extended(offer: Advertisement, reserved: Resources) -> Iterator[_Row]:
    parts = offer.capacity, offer.allocatable, reserved
    for name in sorted({name for part in parts for name in part.extended}):
        has, most, lent = (part.amount(name) for part in parts)
        yield name, has, most, lent, most - offer.allocated.amount(name) - lent


def _sums(snapshot: FleetSnapshot, fleet: _Fleet) -> Iterator[bytes]:
    by_phase = {(str(phase), str(why)): count for (phase, why), count in snapshot.tally.items()}
    yield _lines(families.RESERVATIONS, by_phase.items())
    yield _lines(families.WAITING, [((), snapshot.waiting)])
    yield _lines(families.CLUSTERS, [((state,), n) for state, n in fleet.states.items()])
    yield _lines(families.OVERCOMMITTED, [((), fleet.overcommitted)])


def _lines(family: Family, series: Iterable[tuple[tuple[str, ...], int]]) -> bytes:
    lines = [_header(family).decode()]
    for values, number in series:
        pairs = zip(family.labels, values, strict=True)
        labels = ",".join(f'{name}="{value}"' for name, value in pairs)
        lines.append(
            f"{family.name}{{{labels}}} {number}\n" if labels else f"{family.name} {number}\n"
        )
    return "".join(lines).encode()


def _header(family: Family) -> bytes:
    return f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n".encode()
