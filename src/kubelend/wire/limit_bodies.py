"""The JSON bodies about limits: what providers lend, and what requesters may have.

What administrators write is read strictly: a name that is not known would be a limit that does not hold.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kubelend.wire.bodies import (
    AmountsByName,
    Body,
    Currency,
    EffectivePolicy,
    LendingPolicy,
    Price,
)

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class PolicyRequest(LendingPolicy, frozen=True, forbid_unknown_fields=True):
    """What an administrator says for a cluster; all of it, in place of what was said before."""


class PolicyStatus(Body, frozen=True):
    """Who said what of a cluster, and what holds."""

    cluster_id: str
    admin: LendingPolicy | None = None
    """What an administrator has set."""
    advertised: LendingPolicy | None = None
    """What the cluster says itself."""
    effective: EffectivePolicy | None = None
    """What holds; nothing is limited if it is not there."""


class QuotaRequest(Body, frozen=True, forbid_unknown_fields=True):
    """The most that a cluster may hold and wait for at a time, and spend in a day (UTC)."""

    amounts: AmountsByName = msgspec.field(default_factory=dict)
    """What is not named has no such limit; zero allows none."""
    reservations: Count | None = None
    budget: Price = ""
    currency: Currency = "USD"
    """Of the budget."""


class Quota(Body, frozen=True):
    """The same, as it is set."""

    amounts: dict[str, str] = msgspec.field(default_factory=dict)
    reservations: int | None = None
    budget: str = ""
    currency: str = ""


class QuotaUse(Body, frozen=True):
    """What of a quota is used now."""

    held: dict[str, str] = msgspec.field(default_factory=dict)
    waited_for: dict[str, str] = msgspec.field(default_factory=dict)
    reservations: int = 0
    waiting: int = 0
    spent_today: str = ""
    """With what running reservations will cost until the day (UTC) ends."""


class QuotaStatus(Body, frozen=True):
    """A cluster's quota, and what of it is used."""

    cluster_id: str
    quota: Quota
    used: QuotaUse


class QuotaList(Body, frozen=True):
    """One page of quotas; `next` continues it."""

    quotas: list[QuotaStatus]
    next: str = ""
