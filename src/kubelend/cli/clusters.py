"""Clusters: `get clusters`, `describe cluster`, `cordon`, `uncordon` and `drain`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, limits, options, output, reservation_views
from kubelend.cli.calls import Backend
from kubelend.cli.options import Target
from kubelend.cli.output import Format
from kubelend.kits import tables
from kubelend.wire import bodies

LIVE = "Reserved,Active"
"""The phases in which a reservation holds resources."""


@options.takes(target=options.target)
def get_clusters(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[CLUSTER]",
            help="Only this one.",
            show_default=False,
            callback=options.named("cluster"),
        ),
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    target: Target,
) -> None:
    """List clusters and their free resources, or show one.

    Viewers and admins see all clusters, a cluster only itself.
    """
    wide = format is Format.WIDE
    if name:
        one = calls.call_backend(target, lambda backend: backend.get_cluster(name))
        output.show(
            one,
            format,
            kind="Cluster",
            text=lambda: cluster_table([one], output.now(), wide=wide),
            names=[_reference(one)],
        )
        return
    found, where = calls.call_backend(target, _find_all)
    output.show_list(
        found,
        format,
        kind="Cluster",
        noun="clusters",
        names=[_reference(one) for one in found],
        where=where,
        text=lambda: cluster_table(found, output.now(), wide=wide),
    )


@options.takes(target=options.target)
def describe_cluster(name: options.ClusterName, *, target: Target) -> None:
    """Show the details of a cluster."""
    found = calls.call_backend(target, lambda backend: backend.get_cluster(name))
    output.print_text(cluster_details(found, output.now()))


@options.takes(settings=options.client)
def cordon(
    name: options.ClusterName,
    reason: options.Reason = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Close a cluster to new reservations; existing ones stay."""
    found = calls.call_broker(
        settings, lambda client: client.cordon(name, reason), {"reason": "--reason"}
    )
    _show(found, f"cluster/{name} cordoned", format)


@options.takes(settings=options.client)
def uncordon(
    name: options.ClusterName,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Open a cluster to new reservations again."""
    found = calls.call_broker(settings, lambda client: client.uncordon(name))
    _show(found, f"cluster/{name} uncordoned", format)


@options.takes(settings=options.client)
def drain(
    name: options.ClusterName,
    reason: options.Reason = "",
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Cordon a cluster and move its reservations to other clusters.

    A reservation that fits on no other cluster is released. Shows the reservations that it would move or
    release, and asks for confirmation.
    """
    if dry_run:
        _show_drain_plan(name, _lent(settings, name), format)
        return
    if not yes:
        output.confirm(lambda: _drain_plan(name, _lent(settings, name)), f"Drain cluster {name}?")
    found = calls.call_broker(
        settings, lambda client: client.drain(name, reason), {"reason": "--reason"}
    )
    output.show(
        found,
        format,
        kind="Drain",
        text=lambda: drain_summary(found, output.now()),
        names=reservation_views.references(found.reservations),
    )


async def _find_all(backend: Backend) -> tuple[list[bodies.Cluster], str]:
    return await backend.all_clusters(), calls.search_scope(backend)


def _show(found: bodies.Cluster, sentence: str, format: Format) -> None:
    output.show(found, format, kind="Cluster", text=lambda: sentence, names=[_reference(found)])


def _reference(found: bodies.Cluster) -> str:
    return f"cluster/{found.advertisement.cluster_id}"


def _lent(settings: ClientSettings, name: str) -> list[bodies.Reservation]:
    return calls.call_broker(
        settings, lambda client: client.all_reservations(role="provider", phase=LIVE, cluster=name)
    )


def _show_drain_plan(name: str, lent: list[bodies.Reservation], format: Format) -> None:
    output.show_list(
        lent,
        format,
        kind="Reservation",
        noun="reservations",
        where=f" on cluster {name}",
        names=reservation_views.references(lent),
        text=lambda: _drain_plan(name, lent),
    )


def _drain_plan(name: str, lent: list[bodies.Reservation]) -> str:
    if not lent:
        return f"Cluster {tables.sanitize_line(name)} would be cordoned; it has no reservations."
    count = tables.format_count(len(lent), "reservation")
    heading = (
        f"Cluster {tables.sanitize_line(name)} would be cordoned, and {count} moved or released:"
    )
    return f"{heading}\n\n{reservation_views.table(lent, output.now())}"


# -- text

CLUSTER_HEADERS = ("NAME", "STATUS", "CPU-FREE", "MEMORY-FREE", "GPU-FREE", "SCORE", "LENT", "SEEN")
WIDE_CLUSTER_HEADERS = (
    *CLUSTER_HEADERS,
    "CPU",
    "MEMORY",
    "STORAGE-FREE",
    "REGION",
    "PRICE",
    "CERTIFICATE",
    "ENDPOINT",
)
_PARTS = ("capacity", "allocatable", "allocated", "reserved", "available")


def cluster_table(found: list[bodies.Cluster], now: datetime, *, wide: bool = False) -> str:
    if not wide:
        return tables.format_table(CLUSTER_HEADERS, [_cluster_cells(one, now) for one in found])
    return tables.format_table(
        WIDE_CLUSTER_HEADERS,
        [(*_cluster_cells(one, now), *_wide_cluster_cells(one, now)) for one in found],
    )


def cluster_details(found: bodies.Cluster, now: datetime) -> str:
    known, status = found.advertisement, found.status
    facts = tables.format_pairs(
        [
            ("Name", known.cluster_id),
            ("Status", _status(status)),
            ("Cordon reason", status.cordon_reason),
            ("Message", status.message),
            ("Score", f"{status.score} ({status.rating})"),
            ("Lends", tables.format_count(status.reservations, "reservation")),
            ("Region", known.region),
            ("Labels", ", ".join(f"{key}={value}" for key, value in known.labels.items())),
            ("Prices", _prices(known.cost)),
            *_policy(status),
            ("Endpoint", known.endpoint_url),
            ("Last seen", tables.format_time(status.last_update_time, now)),
            ("Valid until", tables.format_time(status.valid_until, now)),
            ("Certificate", tables.format_time(status.certificate_until, now)),
        ]
    )
    return f"{facts}\n\n{_resource_table(known.resources, status.withheld)}"


def drain_summary(found: bodies.DrainResult, now: datetime) -> str:
    """The drained cluster, and where its reservations are now."""
    name = tables.sanitize_line(found.cluster.advertisement.cluster_id)
    if not found.reservations:
        return f"cluster/{name} drained; it had no reservations"
    moved = sum(one.status.phase in {"Reserved", "Active"} for one in found.reservations)
    rest = len(found.reservations) - moved
    table = reservation_views.table(found.reservations, now)
    return f"cluster/{name} drained: {moved} moved to other clusters, {rest} released\n\n{table}"


def _cluster_cells(found: bodies.Cluster, now: datetime) -> tuple[str, ...]:
    free, status = output.amount_texts(found.advertisement.resources.available), found.status
    return (
        found.advertisement.cluster_id,
        _status(status),
        free.get("cpu", ""),
        output.short_bytes(free.get("memory", "")),
        free.get("gpu", ""),
        status.score,
        str(status.reservations),
        tables.format_age(status.last_update_time, now),
    )


def _wide_cluster_cells(found: bodies.Cluster, now: datetime) -> tuple[str, ...]:
    known, until = found.advertisement, found.status.certificate_until
    total = output.amount_texts(known.resources.allocatable)
    free = output.amount_texts(known.resources.available)
    return (
        total.get("cpu", ""),
        output.short_bytes(total.get("memory", "")),
        output.short_bytes(free.get("storage", "")),
        known.region,
        _short_price(known.cost),
        "" if until is None else tables.format_time_left(until, now),
        known.endpoint_url,
    )


def _policy(status: bodies.ClusterStatus) -> Iterator[tuple[str, str]]:
    if status.policy is None:
        return
    yield from zip(limits.LIMIT_NAMES, limits.effective_limits(status.policy), strict=True)


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


def _resource_table(resources: bodies.Metrics, withheld: dict[str, str]) -> str:
    by_part = {part: output.amount_texts(getattr(resources, part)) for part in _PARTS}
    if withheld:
        by_part["withheld"] = withheld
    names = dict.fromkeys(name for texts in by_part.values() for name in texts)
    rows = [(name, *(texts.get(name, "0") for texts in by_part.values())) for name in names]
    return tables.format_table(("RESOURCE", *(part.upper() for part in by_part)), rows)
