"""Limits set by administrators, per cluster.

A policy limits what the cluster lends as a provider, in addition to its own advertised policy (see
`lending`); a quota limits what it borrows, waits for and spends as a requester (see `quotas`).
"""

from __future__ import annotations

import msgspec

from kubelend.core.lending import LendingPolicy
from kubelend.core.models import ClusterId, Record


class Quota(Record, frozen=True):
    """The most a requester may hold and wait for at a time, and spend per day."""

    amounts: dict[str, int] = msgspec.field(default_factory=dict)
    """By resource. A resource that is not named is unlimited; zero allows none."""
    reservations: int | None = None
    """Number of live and waiting reservations together."""
    budget: int | None = None
    """Billionths of `currency` per UTC day."""
    currency: str = "USD"


class Limits(Record, frozen=True):
    """Limits of one cluster, which may not have advertised yet."""

    cluster: ClusterId
    policy: LendingPolicy | None = None
    quota: Quota | None = None
    revision: int = 0

    @property
    def id(self) -> ClusterId:
        return self.cluster
