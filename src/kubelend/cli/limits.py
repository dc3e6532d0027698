"""`kubelend policy`: to whom a cluster lends, how much and when; looked at, set and cleared."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, limit_views, options, output, request_flags
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.wire.limit_bodies import PolicyRequest, PolicyStatus, QuotaList, QuotaRequest

_NAMES = "NAME,..."
_AMOUNTS = "NAME=QUANTITY,..."

Allow = Annotated[
    request_flags.Many,
    typer.Option(help="Lend to these only; names or patterns such as team-*.", metavar=_NAMES),
]
Deny = Annotated[request_flags.Many, typer.Option(help="Do not lend to these.", metavar=_NAMES)]
KeepBack = Annotated[
    request_flags.Many,
    typer.Option(help="What stays free, such as cpu=4,memory=8Gi.", metavar=_AMOUNTS),
]
MaxLent = Annotated[
    request_flags.Many,
    typer.Option(help="The most to lend in total; 0 lends none.", metavar=_AMOUNTS),
]
MaxPerRequester = Annotated[
    request_flags.Many, typer.Option(help="The most to lend to each requester.", metavar=_AMOUNTS)
]
Hours = Annotated[
    request_flags.Many,
    typer.Option(
        help='When reservations may start, such as "Mon-Fri 18:00-08:00 Europe/Rome"; may be repeated.',
        metavar="TEXT",
    ),
]
File = Annotated[
    str,
    typer.Option("--file", "-f", help="All of it as YAML or JSON; - for stdin.", metavar="FILE"),
]


def policy_from_flags(
    *,
    allow: Allow = None,
    deny: Deny = None,
    keep_back: KeepBack = None,
    max_lent: MaxLent = None,
    max_per_requester: MaxPerRequester = None,
    hours: Hours = None,
    file: File = "",
) -> PolicyRequest:
    """The policy that the flags or the file say."""
    said = PolicyRequest(
        allow=request_flags.split_commas(allow),
        deny=request_flags.split_commas(deny),
        keep_back=_amounts("--keep-back", keep_back),
        max_lent=_amounts("--max-lent", max_lent),
        max_per_requester=_amounts("--max-per-requester", max_per_requester),
        hours=hours or [],
    )
    if file and said != PolicyRequest():
        raise InvalidInput("--file has all of it", hint="give the file or the flags")
    return options.read_document(file, PolicyRequest, "policy") if file else said


@options.takes(settings=options.client)
def get_policy(
    name: options.ClusterName,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """What a cluster lends, as an administrator and as it itself says, and what holds of both."""
    _show_policy(calls.call_broker(settings, lambda client: client.policies.get(name)), format)


@options.takes(policy=policy_from_flags, settings=options.client)
def set_policy(
    name: options.ClusterName,
    *,
    policy: PolicyRequest,
    format: options.Output = Format.TABLE,
    settings: ClientSettings,
) -> None:
    """Set what a cluster lends, in place of what was set before. What it says itself holds too.

    For example: kubelend policy set milan --allow 'team-*' --keep-back cpu=4,memory=8Gi
    """
    if policy == PolicyRequest():
        raise InvalidInput("nothing is limited", hint="`kubelend policy clear` lifts all limits")
    _show_policy(
        calls.call_broker(settings, lambda client: client.policies.set(name, policy)), format
    )


@options.takes(settings=options.client)
def delete_policy(name: options.ClusterName, *, settings: ClientSettings) -> None:
    """Lift what was set. What the cluster says itself holds still."""
    calls.call_broker(settings, lambda client: client.policies.clear(name))
    print(f"no policy is set for {name} any more")


def _amounts(flag: str, texts: request_flags.Many) -> dict[str, str | int]:
    return {**request_flags.parse_pairs(flag, request_flags.split_commas(texts))}


def _show_policy(found: PolicyStatus, format: Format) -> None:
    output.show(
        found,
        format,
        text=lambda: limit_views.policy_text(found, output.width()),
        names=[found.cluster_id],
    )


_BUDGET = re.compile(r"(?P<money>[\d.]+) ?(?P<currency>[A-Za-z]*)", re.ASCII)

Cpu = Annotated[str, typer.Option(help="The most CPU.", metavar="QUANTITY")]
Memory = Annotated[str, typer.Option(help="The most memory.", metavar="QUANTITY")]
Amounts = Annotated[
    request_flags.Many,
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


def quota_from_flags(
    *,
    cpu: Cpu = "",
    memory: Memory = "",
    amounts: Amounts = None,
    reservations: Reservations = None,
    budget: Budget = "",
) -> QuotaRequest:
    """The quota that the flags say."""
    named = {name: text for name, text in (("cpu", cpu), ("memory", memory)) if text}
    more = request_flags.parse_pairs("--amounts", request_flags.split_commas(amounts))
    money, currency = _money(budget)
    return QuotaRequest({**named, **more}, reservations, money, currency)


@options.takes(settings=options.client)
def get_quota(
    name: options.ClusterName,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """What a cluster may hold, wait for and spend, and what of it is used."""
    found = calls.call_broker(settings, lambda client: client.quotas.get(name))
    output.show(found, format, text=lambda: limit_views.quota_text(found), names=[name])


@options.takes(settings=options.client)
def get_quotas(format: options.Output = Format.TABLE, *, settings: ClientSettings) -> None:
    """All quotas, and what of each is used (viewers and admins)."""
    found = calls.call_broker(settings, lambda client: client.quotas.all())
    output.show_list(
        QuotaList(found),
        format,
        noun="quotas",
        names=[one.cluster_id for one in found],
        text=lambda: limit_views.quota_table(found),
    )


@options.takes(quota=quota_from_flags, settings=options.client)
def set_quota(
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
    found = calls.call_broker(settings, lambda client: client.quotas.set(name, quota))
    output.show(found, format, text=lambda: limit_views.quota_text(found), names=[name])


@options.takes(settings=options.client)
def delete_quota(name: options.ClusterName, *, settings: ClientSettings) -> None:
    """Bound it no more."""
    calls.call_broker(settings, lambda client: client.quotas.clear(name))
    print(f"{name} has no quota any more")


def _money(text: str) -> tuple[str, str]:
    match = _BUDGET.fullmatch(text)
    if text and match is None:
        raise InvalidInput(f"--budget: {text!r} is no money", hint="write for example 50EUR")
    return (match["money"], match["currency"] or "USD") if match else ("", "USD")
