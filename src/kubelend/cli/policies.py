"""`kubelend policy`: to whom a cluster lends, how much and when; looked at, set and cleared."""

from __future__ import annotations

from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calling, files, limit_views, options, output, wishes
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.wire.limit_bodies import PolicyRequest, PolicyStatus

_NAMES = "NAME,..."
_AMOUNTS = "NAME=QUANTITY,..."

Allow = Annotated[
    wishes.Many,
    typer.Option(help="Lend to these only; names or patterns such as team-*.", metavar=_NAMES),
]
Deny = Annotated[wishes.Many, typer.Option(help="Do not lend to these.", metavar=_NAMES)]
KeepBack = Annotated[
    wishes.Many, typer.Option(help="What stays free, such as cpu=4,memory=8Gi.", metavar=_AMOUNTS)
]
MaxLent = Annotated[
    wishes.Many, typer.Option(help="The most to lend in total; 0 lends none.", metavar=_AMOUNTS)
]
MaxPerRequester = Annotated[
    wishes.Many, typer.Option(help="The most to lend to each requester.", metavar=_AMOUNTS)
]
Hours = Annotated[
    wishes.Many,
    typer.Option(
        help='When reservations may start, such as "Mon-Fri 18:00-08:00 Europe/Rome"; may be repeated.',
        metavar="TEXT",
    ),
]
File = Annotated[
    str,
    typer.Option("--file", "-f", help="All of it as YAML or JSON; - for stdin.", metavar="FILE"),
]


def read(
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
        allow=wishes.listed(allow),
        deny=wishes.listed(deny),
        keep_back=_amounts("--keep-back", keep_back),
        max_lent=_amounts("--max-lent", max_lent),
        max_per_requester=_amounts("--max-per-requester", max_per_requester),
        hours=hours or [],
    )
    if file and said != PolicyRequest():
        raise InvalidInput("--file has all of it", hint="give the file or the flags")
    return files.read(file, PolicyRequest, "policy") if file else said


@options.takes(settings=options.client)
def show(
    name: options.ClusterName,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """What a cluster lends, as an administrator and as it itself says, and what holds of both."""
    _show(calling.call(settings, lambda client: client.policies.get(name)), format)


@options.takes(policy=read, settings=options.client)
def put(
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
    _show(calling.call(settings, lambda client: client.policies.set(name, policy)), format)


@options.takes(settings=options.client)
def clear(name: options.ClusterName, *, settings: ClientSettings) -> None:
    """Lift what was set. What the cluster says itself holds still."""
    calling.call(settings, lambda client: client.policies.clear(name))
    print(f"no policy is set for {name} any more")


def _amounts(flag: str, texts: wishes.Many) -> dict[str, str | int]:
    return {**wishes.pairs(flag, wishes.listed(texts))}


def _show(found: PolicyStatus, format: Format) -> None:
    output.show(
        found,
        format,
        text=lambda: limit_views.policy(found, output.width()),
        names=[found.cluster_id],
    )
