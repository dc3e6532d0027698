"""JSON bodies of lending policies and quotas.

Requests reject unknown fields, because a misspelled limit would silently not apply.
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
    """Lending policy set by an administrator for a cluster. Replaces the previous one."""


class PolicyStatus(Body, frozen=True):
    """Lending policies of a cluster."""

    cluster_id: str
    admin: LendingPolicy | None = None
    """Policy set by an administrator."""
    advertised: LendingPolicy | None = None
    """Policy advertised by the cluster."""
    effective: EffectivePolicy | None = None
    """Policy in effect: the stricter of both. Absent if nothing is limited."""


class QuotaRequest(Body, frozen=True, forbid_unknown_fields=True):
    """Quota of a cluster: maximum amounts held and waited for, and maximum spend per day (UTC)."""

    amounts: AmountsByName = msgspec.field(default_factory=dict)
    """Maximum amounts by resource. Resources that are not listed are not limited; zero allows none."""
    reservations: Count | None = None
    budget: Price = ""
    currency: Currency = "USD"
    """Currency of the budget."""


class Quota(Body, frozen=True):
    """A quota that is set."""

    amounts: dict[str, str] = msgspec.field(default_factory=dict)
    reservations: int | None = None
    budget: str = ""
    currency: str = ""


class QuotaUse(Body, frozen=True):
    """Current usage of a quota."""

    held: dict[str, str] = msgspec.field(default_factory=dict)
    waited_for: dict[str, str] = msgspec.field(default_factory=dict)
    reservations: int = 0
    waiting: int = 0
    spent_today: str = ""
    """Spend of the current day (UTC), including the cost of running reservations until its end."""


class QuotaStatus(Body, frozen=True):
    """Quota of a cluster and its usage."""

    cluster_id: str
    quota: Quota
    used: QuotaUse


class QuotaList(Body, frozen=True):
    """One page of quotas. `next` is the continue token of the following page."""

    quotas: list[QuotaStatus]
    next: str = ""
