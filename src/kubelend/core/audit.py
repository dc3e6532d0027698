"""Consistency checks: invariants of a ledger, and the store against its audit log.

`kubelend audit check` runs them on a store, and tests run them after every benchmark and fault test. The
indexes of a ledger must equal what its records imply. The replay of the audit log finds records
that are missing in the store.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from kubelend.core import lending
from kubelend.core.accounts import Account
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.core.models import Cluster, ClusterId, Reservation
from kubelend.core.resources import Resources


def violations(ledger: Ledger) -> list[str]:
    """All violated invariants, one sentence each."""
    return [
        *_reserved_is_the_sum_of_live_reservations(ledger),
        *_free_is_what_is_left(ledger),
        *_accounts_count_every_reservation(ledger),
        *_loans_count_every_reservation(ledger),
        *_records_are_consistent(ledger),
        *_earmarks_are_kept(ledger),
        *_tally_counts_every_reservation(ledger),
        *_keys_are_unique(ledger),
        *_revisions_are_in_the_past(ledger),
    ]


def overcommitted(ledger: Ledger) -> list[ClusterId]:
    """Clusters whose own pods use resources they have lent: not a fault of the broker, but worth
    reporting.
    """
    return [
        found for found in ledger.clusters if any(n < 0 for _, n in ledger.available(found).items())
    ]


def _reserved_is_the_sum_of_live_reservations(ledger: Ledger) -> Iterator[str]:
    sums: dict[ClusterId, Resources] = defaultdict(Resources)
    for found in ledger.reservations.values():
        if found.is_live and found.target is not None:
            sums[found.target] += found.request.resources
    for cluster in sorted({*sums, *ledger.clusters}):
        if ledger.reserved(cluster) != sums[cluster]:
            yield (
                f"{cluster}: reserved is {ledger.reserved(cluster).texts()},"
                f" its live reservations are {sums[cluster].texts()}"
            )


def _free_is_what_is_left(ledger: Ledger) -> Iterator[str]:
    offers = (cluster.advertisement.allocatable for cluster in ledger.clusters.values())
    extended = sorted({name for offer in offers for name in offer.extended})
    for cluster, record in ledger.clusters.items():
        row = ledger.fleet.find(cluster)
        if row is None:
            continue
        available = _lendable(ledger, record)
        for name in ("cpu", "memory", "gpu", "storage", *extended):
            column = ledger.fleet.free(name)
            if column is not None and int(column[row]) != available.amount(name):
                yield f"{cluster}: the fleet has {column[row]} {name} free, not {available.amount(name)}"
    if sorted(ledger.clusters) != ledger.fleet.ids:
        yield "the fleet does not contain the clusters of the ledger"


def _lendable(ledger: Ledger, cluster: Cluster) -> Resources:
    """The lendable amount, computed from the records alone."""
    reserved = ledger.reserved(cluster.id)
    available = (cluster.ceiling - reserved).clamped()
    holds = lending.stricter(cluster.advertisement.policy, ledger.limits(cluster.id).policy)
    return available if holds is None else holds.lendable(available, reserved)


def _accounts_count_every_reservation(ledger: Ledger) -> Iterator[str]:
    quotas = {
        name: limits.quota
        for name, limits in ledger.rulebook.limits.items()
        if limits.quota is not None
    }
    if quotas.keys() != ledger.accounts.by_requester.keys():
        yield "the quota usage does not cover exactly the requesters with a quota"
    for name, account in ledger.accounts.by_requester.items():
        own = [found for found in ledger.reservations.values() if found.requester == name]
        if name in quotas and _sums(account) != _sums(Account(quotas[name], own)):
            yield f"{name}: the quota usage is not the sum of its reservations"


def _sums(account: Account) -> tuple[object, ...]:
    held = (account.held, account.holds, account.awaited, account.waits)
    return (*held, account.quota, account.spending.steps())


def _loans_count_every_reservation(ledger: Ledger) -> Iterator[str]:
    sums: dict[tuple[ClusterId, ClusterId], Resources] = defaultdict(Resources)
    for found in ledger.reservations.values():
        if found.is_live and found.target in ledger.fleet.loans.watched:
            sums[found.requester, found.target] += found.request.resources
    counted = {
        (requester, provider): lent
        for requester in {found.requester for found in ledger.reservations.values()}
        for provider, lent in ledger.fleet.loans.of(requester).items()
    }
    if counted != sums:
        yield "the amounts lent per requester are not the sums of its reservations"


def _records_are_consistent(ledger: Ledger) -> Iterator[str]:
    for found in ledger.reservations.values():
        yield from (f"{found.id}: {problem}" for problem in _problems(found))


def _problems(found: Reservation) -> Iterator[str]:
    if found.is_live and (found.target is None or found.expires_at is None):
        yield f"is {found.phase} without a target and an expiry"
    if found.target == found.requester:
        yield "has its requester as provider"
    if found.phase is Phase.PENDING and found.wait_until is None:
        yield "is Pending without a wait timeout"
    if not found.is_live and found.phase is not Phase.PENDING and found.finished_at is None:
        yield f"is {found.phase} without a finish time"
    if not found.request.resources:
        yield "requests no resources"


def _earmarks_are_kept(ledger: Ledger) -> Iterator[str]:
    waiters = [waiter for waiter in ledger.waiting() if waiter.earmark is not None]
    for waiter in waiters:
        if waiter.earmark is not None and ledger.earmarked(waiter.earmark) != waiter:
            yield f"{waiter.id}: {waiter.earmark} is not nominated for it"
    if len(waiters) != ledger.fleet.earmarks:
        yield f"the fleet has {ledger.fleet.earmarks} nominations for {len(waiters)} waiting requests"


def _tally_counts_every_reservation(ledger: Ledger) -> Iterator[str]:
    counted = Counter((found.phase, found.reason) for found in ledger.reservations.values())
    for phase, reason in sorted({*counted, *ledger.tally}):
        tallied, actual = ledger.tally[phase, reason], counted[phase, reason]
        if tallied != actual:
            yield f"the count of {phase} with reason {reason} is {tallied}, not {actual}"


def _keys_are_unique(ledger: Ledger) -> Iterator[str]:
    keys = Counter(
        (found.requester, found.request.key)
        for found in ledger.reservations.values()
        if found.request.key is not None
    )
    for (requester, key), count in keys.items():
        if count > 1:
            yield f"{requester}: {count} reservations share the idempotency key {key!r}"


def _revisions_are_in_the_past(ledger: Ledger) -> Iterator[str]:
    records: list[Cluster | Reservation] = [
        *ledger.clusters.values(),
        *ledger.reservations.values(),
    ]
    for record in records:
        if record.revision > ledger.revision:
            yield f"{record.id}: revision {record.revision} is ahead of the ledger's {ledger.revision}"
