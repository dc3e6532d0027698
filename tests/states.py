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
    columns = {name: (fleet.free(name), fleet.ceiling(name), fleet.shares(name)) for name in names}
    ranks = [(waiter.request.priority, waiter.ticket) for waiter in ledger.waiting()]
    return {
        "revision": ledger.revision,
        "clusters": dict(ledger.clusters),
        "reservations": dict(ledger.reservations),
        "reserved": {name: ledger.reserved(name) for name in known},
        "lent": {name: [found.id for found in ledger.lent_by(name)] for name in known},
        "touching": {name: sorted(found.id for found in ledger.touching(name)) for name in known},
        "by key": {
            (found.requester, key): same and same.id
            for found in ledger.reservations.values()
            if (key := found.request.key) is not None
            for same in [ledger.by_key(found.requester, key)]
        },
        "waiting": [waiter.id for waiter in ledger.waiting()],
        "members": dict(ledger.registry.members),
        "tokens": dict(ledger.registry.tokens),
        "limits": dict(ledger.rulebook.limits),
        "lending": {name: ledger.rulebook.lending(name) for name in known},
        "accounts": {
            name: (found.held, found.holds, found.awaited, found.waits, found.spending.steps())
            for name, found in ledger.accounts.by_requester.items()
        },
        "loans": {name: dict(ledger.fleet.loans.of(name)) for name in known},
        "ids": list(fleet.ids),
        "labels": list(fleet.labels),
        "columns": {name: _plain(column) for name, column in columns.items()},
        "rows": _plain((fleet.valid_until, fleet.open, fleet.currency, fleet.rates)),
        "withheld": {name: _plain(fleet.available(name)) for name in names},
        "shares": {name: _plain(fleet.share_left(name, R)) for name in names},
        "admits": None if fleet.bounds is None else _plain(fleet.bounds.admission(R, len(fleet))),
        "earmarks": (fleet.earmarks, [_plain(fleet.open_to(*rank)) for rank in ranks]),
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
