"""Clusters from the command line: looked at, closed, opened and emptied."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, escapes, limit_views, options, output, reservation_views, tables
from kubelend.cli.calls import Backend
from kubelend.cli.output import Format
from kubelend.wire import bodies

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
        return tables.columns(CLUSTER_HEADERS, [_cluster_cells(one, now) for one in found])
    return tables.columns(
        WIDE_CLUSTER_HEADERS,
        [(*_cluster_cells(one, now), *_wide_cluster_cells(one, now)) for one in found],
    )


def cluster_details(found: bodies.Cluster, now: datetime) -> str:
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
    return f"{facts}\n\n{_resource_table(known.resources, status.withheld)}"


def drain_summary(found: bodies.Drained, now: datetime) -> str:
    """What became of a drained cluster's reservations."""
    name = escapes.line(found.cluster.advertisement.cluster_id)
    if not found.reservations:
        return f"{name} is drained; it lent nothing"
    moved = sum(one.status.phase in {"Reserved", "Active"} for one in found.reservations)
    rest = len(found.reservations) - moved
    table = reservation_views.table(found.reservations, now)
    return f"{name} is drained: {moved} moved to other clusters, {rest} released\n\n{table}"


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
        tables.age(status.last_update_time, now),
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
        "" if until is None else tables.left(until, now),
        known.endpoint_url,
    )


def _policy(status: bodies.ClusterStatus) -> Iterator[tuple[str, str]]:
    if status.policy is None:
        return
    yield from zip(limit_views.NAMES, limit_views.effective_limits(status.policy), strict=True)


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
    return tables.columns(("RESOURCE", *(part.upper() for part in by_part)), rows)


@options.takes(settings=options.target)
def get(
    name: Annotated[
        str, typer.Argument(metavar="[CLUSTER]", help="Only this one.", show_default=False)
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: options.Target,
) -> None:
    """Clusters and what is free there: all (viewers and admins), or one."""
    wide = format is Format.WIDE
    if name:
        one = calls.call_backend(settings, lambda desk: desk.get_cluster(name))
        output.show(
            one,
            format,
            text=lambda: cluster_table([one], output.now(), wide=wide),
            names=[_name(one)],
        )
        return
    found, where = calls.call_backend(settings, _find_all)
    output.show_list(
        bodies.ClusterList(found),
        format,
        noun="clusters",
        names=[_name(one) for one in found],
        where=where,
        text=lambda: cluster_table(found, output.now(), wide=wide),
    )


@options.takes(settings=options.target)
def describe(
    name: options.ClusterName,
    *,
    settings: options.Target,
) -> None:
    """One cluster in full."""
    output.print_text(
        cluster_details(
            calls.call_backend(settings, lambda desk: desk.get_cluster(name)), output.now()
        )
    )


@options.takes(settings=options.client)
def cordon(
    name: options.ClusterName,
    reason: options.Reason = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Close a cluster to new reservations; those it has stay."""
    _say(
        calls.call_broker(settings, lambda client: client.cordon(name, reason)),
        f"{name} is cordoned",
        format,
    )


@options.takes(settings=options.client)
def uncordon(
    name: options.ClusterName,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Open a cluster again."""
    _say(
        calls.call_broker(settings, lambda client: client.uncordon(name)), f"{name} is open", format
    )


@options.takes(settings=options.client)
def drain(
    name: options.ClusterName,
    reason: options.Reason = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Close a cluster and move what it lends. What fits nowhere else is released."""
    found = calls.call_broker(settings, lambda client: client.drain(name, reason))
    output.show(
        found,
        format,
        text=lambda: drain_summary(found, output.now()),
        names=[one.id for one in found.reservations],
    )


async def _find_all(desk: Backend) -> tuple[list[bodies.Cluster], str]:
    return await desk.all_clusters(), calls.search_scope(desk)


def _say(found: bodies.Cluster, sentence: str, format: Format) -> None:
    output.show(found, format, text=lambda: sentence, names=[_name(found)])


def _name(found: bodies.Cluster) -> str:
    return found.advertisement.cluster_id
