"""Consistency checks: invariants of a ledger, and the store against its audit log.

`kubelend audit check` runs them on a store, and tests run them after every benchmark and fault test. The
indexes of a ledger must equal what its records imply. The replay of the audit log finds records
that are missing in the store.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from kubelend.core import lending
from kubelend.core.accounts import QuotaUsage
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.core.models import Cluster, ClusterId, Reservation
from kubelend.core.resources import Resources


def invariant_violations(ledger: Ledger) -> list[str]:
    """All violated invariants, one sentence each."""
    return [
        *_reserved_is_the_sum_of_live_reservations(ledger),
        *_free_is_what_is_left(ledger),
        *_quota_usage_counts_every_reservation(ledger),
        *_lent_counts_every_reservation(ledger),
        *_records_are_consistent(ledger),
        *_nominations_are_consistent(ledger),
        *_phase_counts_are_exact(ledger),
        *_keys_are_unique(ledger),
        *_revisions_are_in_the_past(ledger),
    ]


def overcommitted_clusters(ledger: Ledger) -> list[ClusterId]:
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
                f"{cluster}: reserved is {ledger.reserved(cluster).quantities()},"
                f" its live reservations are {sums[cluster].quantities()}"
            )


def _free_is_what_is_left(ledger: Ledger) -> Iterator[str]:
    offers = (cluster.advertisement.allocatable for cluster in ledger.clusters.values())
    extended = sorted({name for offer in offers for name in offer.extended})
    for cluster, record in ledger.clusters.items():
        row = ledger.fleet.find_row(cluster)
        if row is None:
            continue
        available = _expected_lendable(ledger, record)
        for name in ("cpu", "memory", "gpu", "storage", *extended):
            column = ledger.fleet.free(name)
            if column is not None and int(column[row]) != available.amount(name):
                yield f"{cluster}: the fleet has {column[row]} {name} free, not {available.amount(name)}"
    if sorted(ledger.clusters) != ledger.fleet.ids:
        yield "the fleet does not contain the clusters of the ledger"


def _expected_lendable(ledger: Ledger, cluster: Cluster) -> Resources:
    """The lendable amount, computed from the records alone."""
    reserved = ledger.reserved(cluster.id)
    available = (cluster.ceiling - reserved).clamped()
    holds = lending.effective_policy(cluster.advertisement.policy, ledger.limits(cluster.id).policy)
    return available if holds is None else holds.lendable(available, reserved)


def _quota_usage_counts_every_reservation(ledger: Ledger) -> Iterator[str]:
    quotas = {
        name: limits.quota
        for name, limits in ledger.limit_index.limits.items()
        if limits.quota is not None
    }
    if quotas.keys() != ledger.quota_usages.by_requester.keys():
        yield "the quota usage does not cover exactly the requesters with a quota"
    for name, account in ledger.quota_usages.by_requester.items():
        own = [found for found in ledger.reservations.values() if found.requester == name]
        if name in quotas and _usage_sums(account) != _usage_sums(QuotaUsage(quotas[name], own)):
            yield f"{name}: the quota usage is not the sum of its reservations"


def _usage_sums(account: QuotaUsage) -> tuple[object, ...]:
    held = (account.held, account.held_count, account.pending, account.pending_count)
    return (*held, account.quota, account.daily_spend.steps())


def _lent_counts_every_reservation(ledger: Ledger) -> Iterator[str]:
    sums: dict[tuple[ClusterId, ClusterId], Resources] = defaultdict(Resources)
    for found in ledger.reservations.values():
        if found.is_live and found.target in ledger.fleet.lent_by_requester.tracked:
            sums[found.requester, found.target] += found.request.resources
    counted = {
        (requester, provider): lent
        for requester in {found.requester for found in ledger.reservations.values()}
        for provider, lent in ledger.fleet.lent_by_requester.for_requester(requester).items()
    }
    if counted != sums:
        yield "the amounts lent per requester are not the sums of its reservations"


def _records_are_consistent(ledger: Ledger) -> Iterator[str]:
    for found in ledger.reservations.values():
        yield from (f"{found.id}: {problem}" for problem in _inconsistencies(found))


def _inconsistencies(found: Reservation) -> Iterator[str]:
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


def _nominations_are_consistent(ledger: Ledger) -> Iterator[str]:
    waiters = [waiter for waiter in ledger.waiting() if waiter.nominated_cluster is not None]
    for waiter in waiters:
        if (
            waiter.nominated_cluster is not None
            and ledger.nominated_waiter(waiter.nominated_cluster) != waiter
        ):
            yield f"{waiter.id}: {waiter.nominated_cluster} is not nominated for it"
    if len(waiters) != ledger.fleet.nomination_count:
        yield f"the fleet has {ledger.fleet.nomination_count} nominations for {len(waiters)} waiting requests"


def _phase_counts_are_exact(ledger: Ledger) -> Iterator[str]:
    counted = Counter((found.phase, found.reason) for found in ledger.reservations.values())
    for phase, reason in sorted({*counted, *ledger.phase_counts}):
        tallied, actual = ledger.phase_counts[phase, reason], counted[phase, reason]
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
