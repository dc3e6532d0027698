"""Policies and quotas as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kubelend.cli.output import format_price
from kubelend.kits import tables
from kubelend.wire import admin_bodies, bodies

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


NAMES = Limits(
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
    rows = [row for row in zip(NAMES, *given, strict=True) if row[-1]]
    return tables.format_table(POLICY_HEADERS, rows, width=width)


def policy_table(found: list[admin_bodies.PolicyStatus], width: int | None) -> str:
    """A line for each policy in effect."""
    rows = [(one.cluster_id, _policy_line(one)) for one in found]
    return tables.format_table(POLICY_LIST_HEADERS, rows, width=width)


def _policy_line(found: admin_bodies.PolicyStatus) -> str:
    if found.effective is None:
        return ""
    limits = zip(NAMES, effective_limits(found.effective), strict=True)
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
