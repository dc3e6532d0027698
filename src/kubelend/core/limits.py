"""Who may use whom, and how much of it: the limits that providers, and administrators for them, set.

A provider says in its advertisement to whom it lends, what it keeps back and when it is open; an
administrator may say the same for it, and the stricter of both holds. A quota bounds a requester.
"""

from __future__ import annotations

import msgspec

from kubelend.core.models import ClusterId, Record
from kubelend.core.resources import NOTHING, Resources


class LendingPolicy(Record, frozen=True):
    """What a provider lends, to whom, and when."""

    allow: tuple[str, ...] = ()
    """Requesters, by name or pattern, that it lends to; to everyone if empty."""
    deny: tuple[str, ...] = ()
    """Requesters that it does not lend to, whatever `allow` says."""
    keep_back: Resources = NOTHING
    """What stays free for itself, beside what its own pods have."""
    max_lent: dict[str, int] = msgspec.field(default_factory=dict)
    """The most that is lent in total, by resource; one that is not named has no such limit."""
    max_per_requester: dict[str, int] = msgspec.field(default_factory=dict)
    """The same for each requester."""
    hours: tuple[str, ...] = ()
    """When new reservations may start, each as `Mon-Fri 18:00-08:00 Europe/Rome`; always if empty."""


class Quota(Record, frozen=True):
    """The most that a requester may hold and wait for at a time, and spend in a day."""

    amounts: dict[str, int] = msgspec.field(default_factory=dict)
    """By resource; one that is not named has no such limit."""
    reservations: int | None = None
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
