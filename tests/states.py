"""All that a ledger answers, as plain values. Tests have it from `make`."""

from __future__ import annotations

from typing import Any

from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId

R = ClusterId("r")
"""Who asks, if nobody else is named."""


def state(ledger: Ledger) -> dict[str, object]:
    """All that a ledger answers, as plain values: ledgers with equal states are interchangeable."""
    fleet, names = ledger.fleet, _resource_names(ledger)
    known = sorted({*ledger.clusters, *(r.requester for r in ledger.reservations.values())})
    columns = {
        name: (fleet.free(name), fleet.ceiling(name), fleet.free_and_allocatable(name))
        for name in names
    }
    ranks = [(waiter.request.priority, waiter.ticket) for waiter in ledger.waiting()]
    return {
        "revision": ledger.revision,
        "clusters": dict(ledger.clusters),
        "reservations": dict(ledger.reservations),
        "reserved": {name: ledger.reserved(name) for name in known},
        "lent": {name: [found.id for found in ledger.lent_by(name)] for name in known},
        "touching": {name: sorted(found.id for found in ledger.by_cluster(name)) for name in known},
        "by key": {
            (found.requester, key): same and same.id
            for found in ledger.reservations.values()
            if (key := found.request.key) is not None
            for same in [ledger.by_key(found.requester, key)]
        },
        "waiting": [waiter.id for waiter in ledger.waiting()],
        "members": dict(ledger.member_index.members),
        "tokens": dict(ledger.member_index.tokens),
        "limits": dict(ledger.limit_index.limits),
        "lending": {name: ledger.limit_index.effective_policy(name) for name in known},
        "accounts": {
            name: (
                found.held,
                found.held_count,
                found.pending,
                found.pending_count,
                found.daily_spend.steps(),
            )
            for name, found in ledger.quota_usages.by_requester.items()
        },
        "loans": {name: dict(ledger.fleet.lent_by_requester.for_requester(name)) for name in known},
        "ids": list(fleet.ids),
        "labels": list(fleet.labels),
        "columns": {name: _plain(column) for name, column in columns.items()},
        "rows": _plain((fleet.valid_until, fleet.uncordoned, fleet.currency, fleet.rates)),
        "withheld": {name: _plain(fleet.available(name)) for name in names},
        "shares": {name: _plain(fleet.requester_cap_left(name, R)) for name in names},
        "admits": None
        if fleet.policy_columns is None
        else _plain(fleet.policy_columns.requester_mask(R, len(fleet))),
        "nominations": (
            fleet.nomination_count,
            [_plain(fleet.not_nominated_above(*rank)) for rank in ranks],
        ),
    }


def _resource_names(ledger: Ledger) -> list[str]:
    offered = (
        name for c in ledger.clusters.values() for name in c.advertisement.allocatable.extended
    )
    asked = (name for r in ledger.reservations.values() for name in r.request.resources.extended)
    return ["cpu", "memory", "gpu", "storage", *sorted({*offered, *asked})]


def _plain(values: Any) -> Any:
    """Arrays as lists, however deep, so that `==` compares them."""
    if values is None:
        return None
    return [_plain(value) for value in values] if isinstance(values, tuple) else values.tolist()
