"""The limits that an administrator has set, for a cluster as a provider and as a requester.

A policy bounds what it lends, beside what its own advertisement says (see `lending`); a quota bounds
what it borrows, waits for and spends (see `quotas`).
"""

from __future__ import annotations

import msgspec

from kubelend.core.lending import LendingPolicy
from kubelend.core.models import ClusterId, Record


class Quota(Record, frozen=True):
    """The most that a requester may hold and wait for at a time, and spend in a day."""

    amounts: dict[str, int] = msgspec.field(default_factory=dict)
    """By resource; one that is not named has no such limit, and zero allows none."""
    reservations: int | None = None
    """Live and waiting ones together."""
    budget: int | None = None
    """Billionths of `currency` for each day (UTC)."""
    currency: str = "USD"


class Limits(Record, frozen=True):
    """What an administrator has set for one cluster, which need not have advertised yet."""

    cluster: ClusterId
    policy: LendingPolicy | None = None
    quota: Quota | None = None
    revision: int = 0

    @property
    def id(self) -> ClusterId:
        return self.cluster
