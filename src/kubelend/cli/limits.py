"""Limits: lending policies and quotas, listed, shown, set and deleted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output, request_flags
from kubelend.cli.output import Format, format_price
from kubelend.core.errors import InvalidInput
from kubelend.kits import tables
from kubelend.wire import admin_bodies, bodies
from kubelend.wire.admin_bodies import PolicyRequest, PolicyStatus, QuotaRequest, QuotaStatus

_NAMES: Final = "NAME,..."
_AMOUNTS: Final = "NAME=QUANTITY,..."

PolicyOf = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER", show_default=False, callback=options.named("cluster", "policy")
    ),
]
QuotaOf = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER", show_default=False, callback=options.named("cluster", "quota")
    ),
]


# -- lending policies

Allow = Annotated[
    request_flags.Many,
    typer.Option(help="Lend only to these: names or patterns such as team-*.", metavar=_NAMES),
]
Deny = Annotated[request_flags.Many, typer.Option(help="Do not lend to these.", metavar=_NAMES)]
KeepBack = Annotated[
    request_flags.Many,
    typer.Option(help="Amounts that stay free, such as cpu=4,memory=8Gi.", metavar=_AMOUNTS),
]
MaxLent = Annotated[
    request_flags.Many,
    typer.Option(help="Maximum to lend in total; 0 lends none.", metavar=_AMOUNTS),
]
MaxPerRequester = Annotated[
    request_flags.Many,
    typer.Option(help="Maximum to lend to each requester.", metavar=_AMOUNTS),
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
    typer.Option("--file", "-f", help="Whole policy as YAML or JSON; - for stdin.", metavar="FILE"),
]
_POLICY_FIELDS: Final = {
    "allow": "--allow",
    "deny": "--deny",
    "keepBack": "--keep-back",
    "maxLent": "--max-lent",
    "maxPerRequester": "--max-per-requester",
    "hours": "--hours",
}


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
    """A builder: the policy of the flags, or of the file."""
    given = PolicyRequest(
        allow=request_flags.split_commas(allow),
        deny=request_flags.split_commas(deny),
        keep_back=_amounts("--keep-back", keep_back),
        max_lent=_amounts("--max-lent", max_lent),
        max_per_requester=_amounts("--max-per-requester", max_per_requester),
        hours=hours or [],
    )
    if not file:
        return given
    if given != PolicyRequest():
        raise InvalidInput("--file is the whole policy", hint="give the file or the flags")
    return options.read_document(file, PolicyRequest, "policy", hint="see docs/limits.md")


@options.takes(settings=options.client)
def get_policies(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[CLUSTER]",
            help="Only that of this one.",
            show_default=False,
            callback=options.named("cluster", "policy"),
        ),
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """List the lending policies in effect, or show one.

    The list is for viewers and admins, and has the clusters that have advertised.
    """
    if name:
        _show_policy(calls.call_broker(settings, lambda client: client.policies.get(name)), format)
        return
    clusters = calls.call_broker(settings, lambda client: client.all_clusters())
    found = [
        PolicyStatus(one.advertisement.cluster_id, effective=one.status.policy)
        for one in clusters
        if one.status.policy is not None
    ]
    output.show_list(
        found,
        format,
        kind="Policy",
        noun="policies",
        names=[f"policy/{one.cluster_id}" for one in found],
        text=lambda: policy_table(found, output.width()),
    )


@options.takes(settings=options.client)
def describe_policy(name: PolicyOf, *, settings: ClientSettings) -> None:
    """Show a lending policy: as set by admins, as advertised by the cluster, and in effect."""
    found = calls.call_broker(settings, lambda client: client.policies.get(name))
    output.print_text(policy_text(found, output.width()))


@options.takes(policy=policy_from_flags, settings=options.client)
def set_policy(
    name: PolicyOf,
    *,
    policy: PolicyRequest,
    format: options.Output = Format.TABLE,
    settings: ClientSettings,
) -> None:
    """Set the lending policy of a cluster, replacing the one set before.

    The policy that the cluster advertises itself applies as well.

    For example: kubelend set policy milan --allow 'team-*' --keep-back cpu=4,memory=8Gi
    """
    if policy == PolicyRequest():
        raise InvalidInput(
            "the policy is empty", hint=f"`kubelend delete policy {name}` deletes it"
        )
    found = calls.call_broker(
        settings, lambda client: client.policies.set(name, policy), _POLICY_FIELDS
    )
    _show_policy(found, format)


@options.takes(settings=options.client)
def delete_policy(name: PolicyOf, *, settings: ClientSettings) -> None:
    """Delete the lending policy that was set for a cluster. What it advertises itself stays."""
    calls.call_broker(settings, lambda client: client.policies.clear(name))
    output.print_text(f"policy/{name} deleted")


def _amounts(flag: str, texts: request_flags.Many) -> dict[str, str | int]:
    return {**request_flags.parse_pairs(flag, request_flags.split_commas(texts))}


def _show_policy(found: PolicyStatus, format: Format) -> None:
    output.show(
        found,
        format,
        kind="Policy",
        text=lambda: policy_text(found, output.width()),
        names=[f"policy/{found.cluster_id}"],
    )


# -- quotas

MaxCpu = Annotated[str, typer.Option(help="Maximum CPU.", metavar="QUANTITY")]
MaxMemory = Annotated[str, typer.Option(help="Maximum memory.", metavar="QUANTITY")]
MaxAmounts = Annotated[
    request_flags.Many,
    typer.Option(
        help="Maximum of any resource, such as gpu=2,storage=1Ti; 0 allows none.",
        metavar=_AMOUNTS,
    ),
]
MaxReservations = Annotated[
    int | None,
    typer.Option(help="Maximum number of reservations, with pending ones.", metavar="N", min=0),
]
Budget = Annotated[
    str, typer.Option(help="Maximum cost for each day (UTC), such as 50EUR.", metavar="MONEY")
]
_BUDGET: Final = re.compile(r"(?P<money>[\d.]+) ?(?P<currency>[A-Za-z]*)", re.ASCII)
_QUOTA_FIELDS: Final = {
    "amounts.cpu": "--cpu",
    "amounts.memory": "--memory",
    "amounts": "--amounts",
    "reservations": "--reservations",
    "budget": "--budget",
    "currency": "--budget",
}


def quota_from_flags(
    *,
    cpu: MaxCpu = "",
    memory: MaxMemory = "",
    amounts: MaxAmounts = None,
    reservations: MaxReservations = None,
    budget: Budget = "",
) -> QuotaRequest:
    """A builder: the quota of the flags."""
    named = {name: text for name, text in (("cpu", cpu), ("memory", memory)) if text}
    more = request_flags.parse_pairs("--amounts", request_flags.split_commas(amounts))
    money, currency = _parse_budget(budget)
    return QuotaRequest({**named, **more}, reservations, money, currency)


@options.takes(settings=options.client)
def get_quotas(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[CLUSTER]",
            help="Only that of this one.",
            show_default=False,
            callback=options.named("cluster", "quota"),
        ),
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """List quotas and their use, or show one.

    The list is for viewers and admins; a cluster sees its own quota by its name.
    """
    if name:
        _show_quota(calls.call_broker(settings, lambda client: client.quotas.get(name)), format)
        return
    found = calls.call_broker(settings, lambda client: client.quotas.all())
    output.show_list(
        found,
        format,
        kind="Quota",
        noun="quotas",
        names=[f"quota/{one.cluster_id}" for one in found],
        text=lambda: quota_table(found),
    )


@options.takes(settings=options.client)
def describe_quota(name: QuotaOf, *, settings: ClientSettings) -> None:
    """Show the quota of a cluster and its use."""
    found = calls.call_broker(settings, lambda client: client.quotas.get(name))
    output.print_text(quota_text(found))


@options.takes(quota=quota_from_flags, settings=options.client)
def set_quota(
    name: QuotaOf,
    *,
    quota: QuotaRequest,
    format: options.Output = Format.TABLE,
    settings: ClientSettings,
) -> None:
    """Set the quota of a cluster, replacing the one set before. Existing reservations stay.

    For example: kubelend set quota team-a --cpu 32 --reservations 10 --budget 50EUR
    """
    if quota == QuotaRequest():
        raise InvalidInput("the quota is empty", hint=f"`kubelend delete quota {name}` deletes it")
    found = calls.call_broker(
        settings, lambda client: client.quotas.set(name, quota), _QUOTA_FIELDS
    )
    _show_quota(found, format)


@options.takes(settings=options.client)
def delete_quota(name: QuotaOf, *, settings: ClientSettings) -> None:
    """Delete the quota of a cluster."""
    calls.call_broker(settings, lambda client: client.quotas.clear(name))
    output.print_text(f"quota/{name} deleted")


def _show_quota(found: QuotaStatus, format: Format) -> None:
    output.show(
        found,
        format,
        kind="Quota",
        text=lambda: quota_text(found),
        names=[f"quota/{found.cluster_id}"],
    )


def _parse_budget(text: str) -> tuple[str, str]:
    match = _BUDGET.fullmatch(text)
    if text and match is None:
        raise InvalidInput(
            f"--budget: {text!r} is no amount of money", hint="write for example 50EUR"
        )
    return (match["money"], match["currency"] or "USD") if match else ("", "USD")


# -- as text

POLICY_HEADERS = ("LIMIT", "BY ADMIN", "BY CLUSTER", "IN EFFECT")
POLICY_LIST_HEADERS = ("CLUSTER", "POLICY")
QUOTA_HEADERS = ("CLUSTER", "RESERVATIONS", "SPENT TODAY", "AMOUNTS")


class Limits(NamedTuple):
    """A policy in words, in the order in which it is printed."""

    lends_to: str
    not_to: str
    keeps_back: str
    lends_at_most: str
    to_each_at_most: str
    opening_hours: str


LIMIT_NAMES = Limits(
    "Lends to", "Not to", "Keeps back", "Lends at most", "To each at most", "Opening hours"
)


def policy_text(found: admin_bodies.PolicyStatus, width: int | None) -> str:
    """What admins have set, what the cluster advertises, and what is in effect."""
    if found.effective is None:
        name = tables.sanitize_line(found.cluster_id)
        return f"{name} has no lending policy: it lends all free resources, to everyone and at any time"
    given = (
        _set_limits(found.admin),
        _set_limits(found.advertised),
        effective_limits(found.effective),
    )
    rows = [row for row in zip(LIMIT_NAMES, *given, strict=True) if row[-1]]
    return tables.format_table(POLICY_HEADERS, rows, width=width)


def policy_table(found: list[admin_bodies.PolicyStatus], width: int | None) -> str:
    """A line for each policy in effect."""
    rows = [(one.cluster_id, _policy_line(one)) for one in found]
    return tables.format_table(POLICY_LIST_HEADERS, rows, width=width)


def _policy_line(found: admin_bodies.PolicyStatus) -> str:
    if found.effective is None:
        return ""
    limits = zip(LIMIT_NAMES, effective_limits(found.effective), strict=True)
    return "; ".join(f"{name.lower()} {text}" for name, text in limits if text)


def effective_limits(effective: bodies.EffectivePolicy) -> Limits:
    """The policy in effect, in words; empty where nothing is limited."""
    return Limits(
        " and also ".join(", ".join(names) for names in effective.allow),
        ", ".join(effective.deny),
        limit_amounts(effective.keep_back),
        limit_amounts(effective.max_lent),
        limit_amounts(effective.max_per_requester),
        " and also ".join(", ".join(texts) for texts in effective.hours),
    )


def limit_amounts(texts: Mapping[str, str | int]) -> str:
    """ "4 cpu, 8Gi memory" """
    return ", ".join(f"{amount} {name}" for name, amount in texts.items())


def quota_text(found: admin_bodies.QuotaStatus) -> str:
    """All of one quota."""
    limits, used = found.quota, found.used
    facts = tables.format_pairs(
        [
            ("Cluster", found.cluster_id),
            ("Reservations", _count(found)),
            ("Spent today", _money(found)),
        ]
    )
    names = dict.fromkeys([*limits.amounts, *used.held, *used.waited_for])
    rows = [
        (
            name,
            used.held.get(name, "0"),
            used.waited_for.get(name, "0"),
            limits.amounts.get(name, ""),
        )
        for name in names
    ]
    if not rows:
        return facts
    return f"{facts}\n\n{tables.format_table(('RESOURCE', 'USED', 'PENDING', 'LIMIT'), rows)}"


def quota_table(found: list[admin_bodies.QuotaStatus]) -> str:
    return tables.format_table(QUOTA_HEADERS, [_cells(one) for one in found])


def _cells(found: admin_bodies.QuotaStatus) -> tuple[str, ...]:
    held, most = found.used.held, found.quota.amounts
    parts = (f"{held.get(name, '0')} of {cap} {name}" for name, cap in most.items())
    return found.cluster_id, _count(found), _money(found), ", ".join(parts)


def _count(found: admin_bodies.QuotaStatus) -> str:
    used, most = found.used, found.quota.reservations
    count = f"{used.reservations + used.waiting}" + ("" if most is None else f" of {most}")
    return f"{count}, {used.waiting} pending" if used.waiting else count


def _money(found: admin_bodies.QuotaStatus) -> str:
    limits = found.quota
    if not limits.budget:
        return ""
    return f"{format_price(found.used.spent_today)} of {limits.budget} {limits.currency}"


def _set_limits(policy: bodies.LendingPolicy | None) -> Limits:
    if policy is None:
        return Limits("", "", "", "", "", "")
    return Limits(
        ", ".join(policy.allow),
        ", ".join(policy.deny),
        limit_amounts(policy.keep_back),
        limit_amounts(policy.max_lent),
        limit_amounts(policy.max_per_requester),
        ", ".join(policy.hours),
    )
