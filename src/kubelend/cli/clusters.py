"""Clusters from the command line: looked at, closed, opened and emptied."""

from __future__ import annotations

from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calling, options, output, places
from kubelend.cli.calling import Desk
from kubelend.cli.cluster_views import details, drained, table
from kubelend.cli.output import Format
from kubelend.wire import bodies


@options.takes(settings=options.lender)
def get(
    name: Annotated[
        str, typer.Argument(metavar="[CLUSTER]", help="Only this one.", show_default=False)
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: places.Settings,
) -> None:
    """Clusters and what is free there: all (viewers and admins), or one."""
    wide = format is Format.WIDE
    if name:
        one = calling.ask(settings, lambda desk: desk.get_cluster(name))
        output.show(
            one, format, text=lambda: table([one], output.now(), wide=wide), names=[_name(one)]
        )
        return
    found, where = calling.ask(settings, _find_all)
    output.listing(
        bodies.ClusterList(found),
        format,
        noun="clusters",
        names=[_name(one) for one in found],
        where=where,
        text=lambda: table(found, output.now(), wide=wide),
    )


@options.takes(settings=options.lender)
def describe(
    name: options.ClusterName,
    *,
    settings: places.Settings,
) -> None:
    """One cluster in full."""
    output.say(details(calling.ask(settings, lambda desk: desk.get_cluster(name)), output.now()))


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
        calling.call(settings, lambda client: client.cordon(name, reason)),
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
    _say(calling.call(settings, lambda client: client.uncordon(name)), f"{name} is open", format)


@options.takes(settings=options.client)
def drain(
    name: options.ClusterName,
    reason: options.Reason = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Close a cluster and move what it lends. What fits nowhere else is released."""
    found = calling.call(settings, lambda client: client.drain(name, reason))
    output.show(
        found,
        format,
        text=lambda: drained(found, output.now()),
        names=[one.id for one in found.reservations],
    )


async def _find_all(desk: Desk) -> tuple[list[bodies.Cluster], str]:
    return await desk.all_clusters(), calling.where(desk)


def _say(found: bodies.Cluster, sentence: str, format: Format) -> None:
    output.show(found, format, text=lambda: sentence, names=[_name(found)])


def _name(found: bodies.Cluster) -> str:
    return found.advertisement.cluster_id
