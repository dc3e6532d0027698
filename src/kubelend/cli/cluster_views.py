"""How clusters look to people."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kubelend.cli import amounts, escapes, limit_views, reservation_views, tables
from kubelend.wire import bodies

HEADERS = ("NAME", "STATUS", "CPU-FREE", "MEMORY-FREE", "GPU-FREE", "SCORE", "LENT", "SEEN")
WIDE_HEADERS = (
    *HEADERS,
    "CPU",
    "MEMORY",
    "STORAGE-FREE",
    "REGION",
    "PRICE",
    "CERTIFICATE",
    "ENDPOINT",
)
_PARTS = ("capacity", "allocatable", "allocated", "reserved", "available")


def table(found: list[bodies.Cluster], now: datetime, *, wide: bool = False) -> str:
    if not wide:
        return tables.columns(HEADERS, [_cells(one, now) for one in found])
    return tables.columns(WIDE_HEADERS, [(*_cells(one, now), *_more(one, now)) for one in found])


def details(found: bodies.Cluster, now: datetime) -> str:
    known, status = found.advertisement, found.status
    facts = tables.pairs(
        [
            ("Name", known.cluster_id),
            ("Status", _status(status)),
            ("Cordoned for", status.cordon_reason),
            ("Message", status.message),
            ("Score", f"{status.score} ({status.rating})"),
            ("Lends", tables.counted(status.reservations, "reservation")),
            ("Region", known.region),
            ("Labels", ", ".join(f"{key}={value}" for key, value in known.labels.items())),
            ("Prices", _prices(known.cost)),
            *_policy(status),
            ("Endpoint", known.endpoint_url),
            ("Seen", tables.moment(status.last_update_time, now)),
            ("Valid until", tables.moment(status.valid_until, now)),
            ("Certificate", tables.moment(status.certificate_until, now)),
        ]
    )
    return f"{facts}\n\n{_amounts(known.resources, status.withheld)}"


def drained(found: bodies.Drained, now: datetime) -> str:
    """What became of a drained cluster's reservations."""
    name = escapes.line(found.cluster.advertisement.cluster_id)
    if not found.reservations:
        return f"{name} is drained; it lent nothing"
    moved = sum(one.status.phase in {"Reserved", "Active"} for one in found.reservations)
    rest = len(found.reservations) - moved
    table = reservation_views.table(found.reservations, now)
    return f"{name} is drained: {moved} moved to other clusters, {rest} released\n\n{table}"


def _cells(found: bodies.Cluster, now: datetime) -> tuple[str, ...]:
    free, status = amounts.texts(found.advertisement.resources.available), found.status
    return (
        found.advertisement.cluster_id,
        _status(status),
        free.get("cpu", ""),
        amounts.short(free.get("memory", "")),
        free.get("gpu", ""),
        status.score,
        str(status.reservations),
        tables.age(status.last_update_time, now),
    )


def _more(found: bodies.Cluster, now: datetime) -> tuple[str, ...]:
    known, until = found.advertisement, found.status.certificate_until
    total = amounts.texts(known.resources.allocatable)
    free = amounts.texts(known.resources.available)
    return (
        total.get("cpu", ""),
        amounts.short(total.get("memory", "")),
        amounts.short(free.get("storage", "")),
        known.region,
        _short_price(known.cost),
        "" if until is None else tables.left(until, now),
        known.endpoint_url,
    )


def _policy(status: bodies.ClusterStatus) -> Iterator[tuple[str, str]]:
    if status.policy is None:
        return
    yield from zip(limit_views.NAMES, limit_views.effective(status.policy), strict=True)


def _status(status: bodies.ClusterStatus) -> str:
    if status.closed and status.active and not status.cordoned:
        return "Closed"
    if not status.cordoned:
        return status.phase
    return "Cordoned" if status.active else f"{status.phase},Cordoned"


def _short_price(cost: bodies.Cost | None) -> str:
    return f"{cost.cpu_cost or 0}/{cost.memory_cost or 0} {cost.currency}" if cost else ""


def _prices(cost: bodies.Cost | None) -> str:
    if cost is None:
        return ""
    known = (
        (cost.cpu_cost, "core"),
        (cost.memory_cost, "GB"),
        (cost.gpu_cost, "GPU"),
        (cost.storage_cost, "GB of storage"),
    )
    each = (f"{price} per {unit}" for price, unit in known if price)
    return f"{', '.join(each)} and hour, in {cost.currency}"


def _amounts(resources: bodies.Metrics, withheld: dict[str, str]) -> str:
    by_part = {part: amounts.texts(getattr(resources, part)) for part in _PARTS}
    if withheld:
        by_part["withheld"] = withheld
    names = dict.fromkeys(name for texts in by_part.values() for name in texts)
    rows = [(name, *(texts.get(name, "0") for texts in by_part.values())) for name in names]
    return tables.columns(("RESOURCE", *(part.upper() for part in by_part)), rows)
