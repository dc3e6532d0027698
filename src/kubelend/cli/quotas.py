"""`kubelend quota`: what a cluster may hold, wait for and spend; looked at, set and cleared."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calling, limit_views, options, output, wishes
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.wire.limit_bodies import QuotaList, QuotaRequest

_BUDGET = re.compile(r"(?P<money>[\d.]+) ?(?P<currency>[A-Za-z]*)", re.ASCII)

Cpu = Annotated[str, typer.Option(help="The most CPU.", metavar="QUANTITY")]
Memory = Annotated[str, typer.Option(help="The most memory.", metavar="QUANTITY")]
Amounts = Annotated[
    wishes.Many,
    typer.Option(
        help="The most of any resource, such as gpu=2,storage=1Ti; 0 allows none.",
        metavar="NAME=QUANTITY,...",
    ),
]
Reservations = Annotated[
    int | None,
    typer.Option(help="How many, live and waiting ones together.", metavar="N", min=0),
]
Budget = Annotated[
    str, typer.Option(help="Money for each day (UTC), such as 50EUR.", metavar="MONEY")
]


def read(
    *,
    cpu: Cpu = "",
    memory: Memory = "",
    amounts: Amounts = None,
    reservations: Reservations = None,
    budget: Budget = "",
) -> QuotaRequest:
    """The quota that the flags say."""
    named = {name: text for name, text in (("cpu", cpu), ("memory", memory)) if text}
    more = wishes.pairs("--amounts", wishes.listed(amounts))
    money, currency = _money(budget)
    return QuotaRequest({**named, **more}, reservations, money, currency)


@options.takes(settings=options.client)
def show(
    name: options.ClusterName,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """What a cluster may hold, wait for and spend, and what of it is used."""
    found = calling.call(settings, lambda client: client.quotas.get(name))
    output.show(found, format, text=lambda: limit_views.quota(found), names=[name])


@options.takes(settings=options.client)
def listing(format: options.Output = Format.TABLE, *, settings: ClientSettings) -> None:
    """All quotas, and what of each is used (viewers and admins)."""
    found = calling.call(settings, lambda client: client.quotas.all())
    output.listing(
        QuotaList(found),
        format,
        noun="quotas",
        names=[one.cluster_id for one in found],
        text=lambda: limit_views.quotas(found),
    )


@options.takes(quota=read, settings=options.client)
def put(
    name: options.ClusterName,
    *,
    quota: QuotaRequest,
    format: options.Output = Format.TABLE,
    settings: ClientSettings,
) -> None:
    """Bound what a cluster may have, in place of what was set before. What it holds already stays.

    For example: kubelend quota set team-a --cpu 32 --reservations 10 --budget 50EUR
    """
    if quota == QuotaRequest():
        raise InvalidInput("nothing is bounded", hint="`kubelend quota clear` lifts all bounds")
    found = calling.call(settings, lambda client: client.quotas.set(name, quota))
    output.show(found, format, text=lambda: limit_views.quota(found), names=[name])


@options.takes(settings=options.client)
def clear(name: options.ClusterName, *, settings: ClientSettings) -> None:
    """Bound it no more."""
    calling.call(settings, lambda client: client.quotas.clear(name))
    print(f"{name} has no quota any more")


def _money(text: str) -> tuple[str, str]:
    match = _BUDGET.fullmatch(text)
    if text and match is None:
        raise InvalidInput(f"--budget: {text!r} is no money", hint="write for example 50EUR")
    return (match["money"], match["currency"] or "USD") if match else ("", "USD")
