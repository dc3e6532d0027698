"""Limits: lending policies and quotas, listed, shown, set and deleted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output, request_flags
from kubelend.cli.options import Many, flag
from kubelend.cli.output import Column, OutputFormat, Printer, format_price
from kubelend.core.errors import InvalidInput
from kubelend.kits import tables
from kubelend.wire import bodies
from kubelend.wire.admin_bodies import PolicyRequest, PolicyStatus, QuotaRequest, QuotaStatus

_NAMES: Final = "NAME,..."
_AMOUNTS: Final = "NAME=QUANTITY,..."

PolicyOf = Annotated[str, options.argument("CLUSTER", "cluster", "policy")]
QuotaOf = Annotated[str, options.argument("CLUSTER", "cluster", "quota")]


# -- lending policies

Allow = Annotated[Many, flag("Lend only to these: names or patterns such as team-*.", _NAMES)]
Deny = Annotated[Many, flag("Do not lend to these.", _NAMES)]
KeepBack = Annotated[Many, flag("Amounts that stay free, such as cpu=4,memory=8Gi.", _AMOUNTS)]
MaxLent = Annotated[Many, flag("Maximum to lend in total; 0 lends none.", _AMOUNTS)]
MaxPerRequester = Annotated[Many, flag("Maximum to lend to each requester.", _AMOUNTS)]
Hours = Annotated[
    Many,
    flag(
        'When reservations may start, such as "Mon-Fri 18:00-08:00 Europe/Rome"; may be repeated.',
        "TEXT",
    ),
]
File = Annotated[str, flag("Whole policy as YAML or JSON; - for stdin.", "FILE", "--file", "-f")]
_POLICY_FIELDS: Final = calls.fields_of(
    "", "allow", "deny", "keepBack", "maxLent", "maxPerRequester", "hours"
)


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
        str, options.argument("[CLUSTER]", "cluster", "policy", help="Only that of this one.")
    ] = "",
    format: options.Output = OutputFormat.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """List the lending policies in effect, or show one.

    The list is for viewers and admins; a cluster sees its own policy by its name.
    """
    if name:
        _show_policy(calls.call_broker(settings, lambda client: client.policies.get(name)), format)
    else:
        found = calls.call_broker(settings, lambda client: client.policies.all())
        POLICIES.show_list(found, format)


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
    format: options.Output = OutputFormat.TABLE,
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


def _amounts(flag: str, texts: Many) -> dict[str, str | int]:
    return {**request_flags.parse_pairs(flag, request_flags.split_commas(texts))}


def _show_policy(found: PolicyStatus, format: OutputFormat) -> None:
    POLICIES.show(found, format, lambda: policy_text(found, output.width()))


# -- quotas

MaxCpu = Annotated[str, flag("Maximum CPU.", "QUANTITY")]
MaxMemory = Annotated[str, flag("Maximum memory.", "QUANTITY")]
MaxAmounts = Annotated[
    Many, flag("Maximum of any resource, such as gpu=2,storage=1Ti; 0 allows none.", _AMOUNTS)
]
MaxReservations = Annotated[
    int | None, flag("Maximum number of reservations, with pending ones.", "N", min=0)
]
Budget = Annotated[str, flag("Maximum cost for each day (UTC), such as 50EUR.", "MONEY")]
_BUDGET: Final = re.compile(r"(?P<money>[\d.]+) ?(?P<currency>[A-Za-z]*)", re.ASCII)
_QUOTA_FIELDS: Final = {
    **calls.fields_of("amounts.", "cpu", "memory"),
    **calls.fields_of("", "amounts", "reservations", "budget"),
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
        str, options.argument("[CLUSTER]", "cluster", "quota", help="Only that of this one.")
    ] = "",
    format: options.Output = OutputFormat.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """List quotas and their use, or show one.

    The list is for viewers and admins; a cluster sees its own quota by its name.
    """
    if name:
        _show_quota(calls.call_broker(settings, lambda client: client.quotas.get(name)), format)
    else:
        QUOTAS.show_list(calls.call_broker(settings, lambda client: client.quotas.all()), format)


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
    format: options.Output = OutputFormat.TABLE,
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


def _show_quota(found: QuotaStatus, format: OutputFormat) -> None:
    QUOTAS.show(found, format, lambda: quota_text(found))


def _parse_budget(text: str) -> tuple[str, str]:
    match = _BUDGET.fullmatch(text)
    if text and match is None:
        raise InvalidInput(
            f"--budget: {text!r} is no amount of money", hint="write for example 50EUR"
        )
    return (match["money"], match["currency"] or "USD") if match else ("", "USD")


# -- as text

POLICY_HEADERS = ("LIMIT", "ADMIN", "ADVERTISED", "EFFECTIVE")


_LIMITS: Final = {
    "Lends to": "allow",
    "Not to": "deny",
    "Keeps back": "keep_back",
    "Lends at most": "max_lent",
    "To each at most": "max_per_requester",
    "Opening hours": "hours",
}
"""The parts of a policy, in the order in which they are printed, and their attributes."""


def policy_text(found: PolicyStatus, width: int | None) -> str:
    """What admins have set, what the cluster advertises, and what is in effect."""
    if found.effective is None:
        name = tables.sanitize_line(found.cluster_id)
        return f"{name} has no lending policy: it lends all free resources, to everyone and at any time"
    given = [
        limits_of(policy).values() for policy in (found.admin, found.advertised, found.effective)
    ]
    rows = [row for row in zip(_LIMITS, *given, strict=True) if row[-1]]
    return tables.format_table(POLICY_HEADERS, rows, width=width)


def limits_of(policy: bodies.LendingPolicy | bodies.EffectivePolicy | None) -> dict[str, str]:
    """A policy in words; empty where nothing is limited."""
    return {name: _limit_text(getattr(policy, field, None)) for name, field in _LIMITS.items()}


def _limit_text(value: Mapping[str, str | int] | list[str] | list[list[str]] | None) -> str:
    """ "4 cpu, 8Gi memory", or "team-* and also team-a, team-b" for names that both sides limit."""
    if isinstance(value, Mapping):
        return ", ".join(f"{amount} {name}" for name, amount in value.items())
    parts = [one if isinstance(one, str) else ", ".join(one) for one in value or ()]
    return (" and also " if value and isinstance(value[0], list) else ", ").join(parts)


def quota_text(found: QuotaStatus) -> str:
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
    if not names:
        return facts
    held, waited_for, most = used.held, used.waited_for, limits.amounts
    rows = [
        (name, held.get(name, "0"), waited_for.get(name, "0"), most.get(name, "")) for name in names
    ]
    return f"{facts}\n\n{tables.format_table(('RESOURCE', 'USED', 'PENDING', 'LIMIT'), rows)}"


def _amounts_used(found: QuotaStatus) -> str:
    held = found.used.held
    parts = (f"{held.get(name, '0')} of {cap} {name}" for name, cap in found.quota.amounts.items())
    return ", ".join(parts)


def _count(found: QuotaStatus) -> str:
    used, most = found.used, found.quota.reservations
    count = f"{used.reservations + used.waiting}" + ("" if most is None else f" of {most}")
    return f"{count}, {used.waiting} pending" if used.waiting else count


def _money(found: QuotaStatus) -> str:
    limits = found.quota
    if not limits.budget:
        return ""
    return f"{format_price(found.used.spent_today)} of {limits.budget} {limits.currency}"


def _policy_line(found: PolicyStatus) -> str:
    limits = limits_of(found.effective).items()
    return "; ".join(f"{name.lower()} {text}" for name, text in limits if text)


POLICIES: Final[Printer[PolicyStatus]] = Printer(
    "Policy",
    "policies",
    lambda one: f"policy/{one.cluster_id}",
    [
        Column("CLUSTER", lambda one, _: one.cluster_id),
        Column("POLICY", lambda one, _: _policy_line(one)),
    ],
    wraps=True,
)
QUOTAS: Final[Printer[QuotaStatus]] = Printer(
    "Quota",
    "quotas",
    lambda one: f"quota/{one.cluster_id}",
    [
        Column("CLUSTER", lambda one, _: one.cluster_id),
        Column("RESERVATIONS", lambda one, _: _count(one)),
        Column("SPENT-TODAY", lambda one, _: _money(one)),
        Column("AMOUNTS", lambda one, _: _amounts_used(one)),
    ],
)
