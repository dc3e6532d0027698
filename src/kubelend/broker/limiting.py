"""Who may use whom, as use cases: each is a command or a question for the single writer."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import NamedTuple

from kubelend.broker.writer import Writer
from kubelend.core import lending, limiting
from kubelend.core.accounts import Account
from kubelend.core.ledger import Ledger
from kubelend.core.lending import Lending, LendingPolicy
from kubelend.core.limits import Limits, Quota
from kubelend.core.models import ClusterId


class PolicyView(NamedTuple):
    """What is said of a provider, by whom, and what holds."""

    cluster: ClusterId
    ordered: LendingPolicy | None
    """By an administrator."""
    advertised: LendingPolicy | None
    holds: Lending | None


class QuotaView(NamedTuple):
    """A requester's quota at a moment. The account is a copy, as it was then."""

    cluster: ClusterId
    account: Account
    at: datetime


class Limiting:
    """Policies and quotas."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    # -- policies

    async def policy(self, cluster: ClusterId) -> PolicyView:
        return await self._writer.read(lambda ledger: _policy(ledger, cluster))

    async def set_policy(self, cluster: ClusterId, policy: LendingPolicy) -> PolicyView:
        return await self._writer.change(
            lambda ledger, now: limiting.set_policy(ledger, cluster, policy, now),
            lambda ledger, _: _view(ledger, cluster),
        )

    async def clear_policy(self, cluster: ClusterId) -> None:
        await self._writer.change(
            lambda ledger, now: limiting.clear_policy(ledger, cluster, now), lambda _, none: none
        )

    # -- quotas

    async def quota(self, cluster: ClusterId) -> QuotaView:
        return await self._writer.read(lambda ledger: self._quota(ledger, cluster))

    async def quotas(self, after: str, limit: int) -> list[QuotaView]:
        """A page in the order of cluster IDs."""

        def page(ledger: Ledger) -> list[QuotaView]:
            later = (name for name in sorted(ledger.accounts.by_requester) if name > after)
            return [self._quota(ledger, name) for name in islice(later, limit)]

        return await self._writer.read(page)

    async def set_quota(self, cluster: ClusterId, quota: Quota) -> QuotaView:
        return await self._writer.change(
            lambda ledger, now: limiting.set_quota(ledger, cluster, quota, now),
            lambda ledger, _: self._quota(ledger, cluster),
        )

    async def clear_quota(self, cluster: ClusterId) -> None:
        await self._writer.change(
            lambda ledger, now: limiting.clear_quota(ledger, cluster, now), lambda _, none: none
        )

    def _quota(self, ledger: Ledger, cluster: ClusterId) -> QuotaView:
        account = ledger.accounts.get(cluster)
        if account is None:
            raise limiting.no_quota(cluster)
        return QuotaView(cluster, account.copy(), self._writer.clock())


def _policy(ledger: Ledger, cluster: ClusterId) -> PolicyView:
    if ledger.limits(cluster) == Limits(cluster):
        ledger.cluster(cluster)  # or it is not known at all
    return _view(ledger, cluster)


def _view(ledger: Ledger, cluster: ClusterId) -> PolicyView:
    known = ledger.clusters.get(cluster)
    advertised = None if known is None else known.advertisement.policy
    ordered = ledger.limits(cluster).policy
    return PolicyView(cluster, ordered, advertised, lending.stricter(advertised, ordered))
