"""Commands that set and clear policies and quotas.

Existing reservations stay, whatever a new limit says: limits apply to new placements.
"""

from __future__ import annotations

from datetime import datetime

from kubelend.core.commands import Command
from kubelend.core.errors import NotFound
from kubelend.core.events import PolicySet, QuotaSet
from kubelend.core.ledger import Ledger
from kubelend.core.lending import NO_POLICY, LendingPolicy
from kubelend.core.limits import Limits, Quota
from kubelend.core.models import ClusterId


def set_policy(
    ledger: Ledger, cluster: ClusterId, policy: LendingPolicy, now: datetime
) -> Command[Limits]:
    """Sets the administrators' policy of a provider, which may not have advertised yet."""
    wanted = None if policy == NO_POLICY else policy
    if ledger.limits(cluster).policy != wanted:
        yield PolicySet(now, cluster, wanted)
    return ledger.limits(cluster)


def clear_policy(ledger: Ledger, cluster: ClusterId, now: datetime) -> Command[None]:
    """Removes the administrators' policy; the provider's own policy stays in force."""
    if ledger.limits(cluster).policy is None:
        raise NotFound(f"no policy is set for {cluster!r}", hint="see `kubelend get policies`")
    yield PolicySet(now, cluster, None)


def set_quota(ledger: Ledger, cluster: ClusterId, quota: Quota, now: datetime) -> Command[Limits]:
    """Sets a quota; an empty quota only enables usage accounting."""
    if ledger.limits(cluster).quota != quota:
        yield QuotaSet(now, cluster, quota)
    return ledger.limits(cluster)


def clear_quota(ledger: Ledger, cluster: ClusterId, now: datetime) -> Command[None]:
    if ledger.limits(cluster).quota is None:
        raise quota_not_found(cluster)
    yield QuotaSet(now, cluster, None)


def quota_not_found(cluster: ClusterId) -> NotFound:
    return NotFound(f"{cluster!r} has no quota", hint="an administrator can set one")
