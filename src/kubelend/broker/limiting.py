"""Use cases of lending policies and quotas."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import NamedTuple

from kubelend.broker.writer import LedgerWriter
from kubelend.core import lending, limiting
from kubelend.core.accounts import QuotaUsage
from kubelend.core.ledger import Ledger
from kubelend.core.lending import EffectivePolicy, LendingPolicy
from kubelend.core.limits import Limits, Quota
from kubelend.core.models import ClusterId


class PolicyView(NamedTuple):
    """The policies of a provider: set by an administrator, advertised, and effective."""

    cluster: ClusterId
    admin_policy: LendingPolicy | None
    """Set by an administrator."""
    advertised: LendingPolicy | None
    effective: EffectivePolicy | None


class QuotaView(NamedTuple):
    """Quota and usage of a requester at a point in time; the usage is a copy."""

    cluster: ClusterId
    usage: QuotaUsage
    at: datetime


class LimitService:
    """Reads and sets policies and quotas."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    # -- policies

    async def policy(self, cluster: ClusterId) -> PolicyView:
        return await self._writer.read(lambda ledger: _known_policy_view(ledger, cluster))

    async def set_policy(self, cluster: ClusterId, policy: LendingPolicy) -> PolicyView:
        return await self._writer.change(
            lambda ledger, now: limiting.set_policy(ledger, cluster, policy, now),
            lambda ledger, _: _policy_view(ledger, cluster),
        )

    async def clear_policy(self, cluster: ClusterId) -> None:
        await self._writer.change(
            lambda ledger, now: limiting.clear_policy(ledger, cluster, now), lambda _, none: none
        )

    # -- quotas

    async def quota(self, cluster: ClusterId) -> QuotaView:
        return await self._writer.read(lambda ledger: self._quota_view(ledger, cluster))

    async def quotas(self, after: str, limit: int) -> list[QuotaView]:
        """Returns a page, ordered by cluster ID."""

        def page(ledger: Ledger) -> list[QuotaView]:
            later = (name for name in sorted(ledger.quota_usages.by_requester) if name > after)
            return [self._quota_view(ledger, name) for name in islice(later, limit)]

        return await self._writer.read(page)

    async def set_quota(self, cluster: ClusterId, quota: Quota) -> QuotaView:
        return await self._writer.change(
            lambda ledger, now: limiting.set_quota(ledger, cluster, quota, now),
            lambda ledger, _: self._quota_view(ledger, cluster),
        )

    async def clear_quota(self, cluster: ClusterId) -> None:
        await self._writer.change(
            lambda ledger, now: limiting.clear_quota(ledger, cluster, now), lambda _, none: none
        )

    def _quota_view(self, ledger: Ledger, cluster: ClusterId) -> QuotaView:
        account = ledger.quota_usages.get(cluster)
        if account is None:
            raise limiting.quota_not_found(cluster)
        return QuotaView(cluster, account.copy(), self._writer.clock())


def _known_policy_view(ledger: Ledger, cluster: ClusterId) -> PolicyView:
    if ledger.limits(cluster) == Limits(cluster):
        ledger.cluster(cluster)  # raises if the cluster is unknown
    return _policy_view(ledger, cluster)


def _policy_view(ledger: Ledger, cluster: ClusterId) -> PolicyView:
    known = ledger.clusters.get(cluster)
    advertised = None if known is None else known.advertisement.policy
    ordered = ledger.limits(cluster).policy
    return PolicyView(cluster, ordered, advertised, lending.effective_policy(advertised, ordered))
