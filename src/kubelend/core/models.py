"""Records of the domain: advertisements, clusters, requests, reservations, quotas and limits.

Records are frozen and changed by `replace`. Stores persist them as they are, so a new field needs a
default: a record written by an older version must still load.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NewType

import msgspec

from kubelend.core.lending import LendingPolicy
from kubelend.core.lifecycle import LIVE, Phase, Reason
from kubelend.core.prices import Prices
from kubelend.core.resources import Resources

ClusterId = NewType("ClusterId", str)
ReservationId = NewType("ReservationId", str)
RequestKey = NewType("RequestKey", str)

REGION_LABEL = "topology.kubernetes.io/region"
"""The well-known node label for the region; clusters advertise it like any other label."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Base of all records: immutable, default values omitted when stored.

    Records are acyclic, so they are excluded from garbage collection: there are hundreds of
    thousands of them.
    """


class Advertisement(Record, frozen=True):
    """The resources a cluster reports. The broker computes what is reserved and available."""

    cluster: ClusterId
    capacity: Resources
    allocatable: Resources
    allocated: Resources
    sent_at: datetime
    """From the sender's clock: displayed only, never used for decisions."""
    name: str = ""
    prices: Prices | None = None
    labels: dict[str, str] = {}
    valid_for: timedelta | None = None
    endpoint: str = ""
    policy: LendingPolicy | None = None


class Cluster(Record, frozen=True):
    """A registered cluster with its latest advertisement."""

    advertisement: Advertisement
    received_at: datetime
    valid_until: datetime
    """From this time on the advertisement is stale and the cluster gets no new reservations."""
    cordon: str | None = None
    """Why an administrator cordoned the cluster; None if it is schedulable."""
    certificate_until: datetime | None = None
    """Expiry of the client certificate used for the latest advertisement."""
    revision: int = 0

    @property
    def id(self) -> ClusterId:
        return self.advertisement.cluster

    @property
    def ceiling(self) -> Resources:
        """Allocatable minus allocated: the most that can be lent."""
        return self.advertisement.allocatable - self.advertisement.allocated

    def is_stale(self, now: datetime) -> bool:
        return now >= self.valid_until

    def has_same_offer(self, before: Cluster) -> bool:
        """Whether nothing relevant to placement changed; most advertisements are only heartbeats."""
        old, new = before.advertisement, self.advertisement
        return (
            new.allocatable == old.allocatable
            and new.allocated == old.allocated
            and new.labels == old.labels
            and new.prices == old.prices
            and new.policy == old.policy
            and self.cordon == before.cordon
        )


class Constraints(Record, frozen=True):
    """Placement constraints of a request beside its resources."""

    labels: dict[str, str] = {}
    pinned: ClusterId | None = None
    excluded: tuple[ClusterId, ...] = ()
    max_price: int | None = None
    """Billionths of `currency` per hour, for the whole request."""
    currency: str = ""
    """Currency of `max_price`; `prices.DEFAULT_CURRENCY` if empty."""


UNCONSTRAINED = Constraints()
"""Shared by the many requests without constraints."""


class Request(Record, frozen=True):
    """A request for resources, whichever API it was submitted through."""

    requester: ClusterId
    resources: Resources
    duration: timedelta
    priority: int = 0
    wait: timedelta = timedelta()
    policy: str = "headroom"
    weights: dict[str, float] = {}
    constraints: Constraints = UNCONSTRAINED
    key: RequestKey | None = None
    failover: bool = True
    """Whether it moves to another cluster when its provider is lost, or fails."""


class Charge(Record, frozen=True):
    """The cost of a reservation at a previous provider."""

    since: datetime
    until: datetime
    hourly: int
    currency: str


class HoldReport(Record, frozen=True):
    """Whether the nodes of the provider really keep the resources, as it reports."""

    is_held: bool
    reason: str
    message: str = ""


class Reservation(Record, frozen=True):
    """A request with its current state."""

    id: ReservationId
    request: Request
    created_at: datetime
    phase: Phase = Phase.PENDING
    reason: Reason = Reason.WAITING
    message: str = ""
    target: ClusterId | None = None
    left: tuple[ClusterId, ...] = ()
    """Previous providers, which refused, were drained or became unreachable; never tried again."""
    nominated_cluster: ClusterId | None = None
    """While Pending: the cluster nominated for this request, as `nominatedNodeName` in
    kube-scheduler. Requests that rank lower are not placed there, so that smaller requests cannot
    starve it.
    """
    ticket: int = 0
    """The revision of its creation; orders waiting requests of the same priority."""
    wait_until: datetime | None = None
    reserved_at: datetime | None = None
    expires_at: datetime | None = None
    acknowledged_at: datetime | None = None
    activated_at: datetime | None = None
    finished_at: datetime | None = None
    hourly: int = 0
    """Billionths of `currency` per hour, fixed at placement."""
    currency: str = ""
    """Empty while Pending, and if the provider publishes no prices."""
    charges: tuple[Charge, ...] = ()
    revision: int = 0
    held: HoldReport | None = None
    """None until the provider has reported it."""

    @property
    def requester(self) -> ClusterId:
        return self.request.requester

    @property
    def involved_clusters(self) -> set[ClusterId]:
        """The requester and all current and previous providers."""
        return {self.requester, *self.left, *(() if self.target is None else (self.target,))}

    @property
    def is_live(self) -> bool:
        """Whether it holds resources on its target (Reserved or Active)."""
        return self.phase in LIVE

    @property
    def deadline(self) -> datetime | None:
        """When the broker ends it: wait timeout or expiry; None once it is finished."""
        if self.phase is Phase.PENDING:
            return self.wait_until
        return self.expires_at if self.is_live else None


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
