"""The records of the domain: what is advertised, asked for and reserved. Frozen; changed by `replace`.

They are what the ledger holds and what stores keep, so a new field needs a default: a record written
by an older version must still load.
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
"""A region is a label like any other, under the name that Kubernetes nodes carry it."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The common shape of all records: immutable, and stored without what is default.

    They are trees, so the collector of cycles need not look at them: there are hundreds of thousands.
    """


class Advertisement(Record, frozen=True):
    """What a cluster says of itself. Reserved and available are the broker's, so they are not here."""

    cluster: ClusterId
    capacity: Resources
    allocatable: Resources
    allocated: Resources
    sent_at: datetime
    """The sender's clock: shown, never judged by."""
    name: str = ""
    prices: Prices | None = None
    labels: dict[str, str] = {}
    valid_for: timedelta | None = None
    endpoint: str = ""
    policy: LendingPolicy | None = None


class Cluster(Record, frozen=True):
    """A cluster as the broker knows it."""

    advertisement: Advertisement
    received_at: datetime
    valid_until: datetime
    """From here on the advertisement is stale, and nothing new is placed on the cluster."""
    cordon: str | None = None
    """Why an admin closed it to new reservations; None while it is open."""
    certificate_until: datetime | None = None
    """When the certificate ends that it last advertised with."""
    revision: int = 0

    @property
    def id(self) -> ClusterId:
        return self.advertisement.cluster

    @property
    def ceiling(self) -> Resources:
        """What could be lent if nothing were reserved."""
        return self.advertisement.allocatable - self.advertisement.allocated

    def is_stale(self, now: datetime) -> bool:
        return now >= self.valid_until

    def offers_the_same_as(self, before: Cluster) -> bool:
        """Whether all that decisions go by has stayed: most advertisements only say "still here"."""
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
    """Where a request may go, beside where it fits."""

    labels: dict[str, str] = {}
    pinned: ClusterId | None = None
    excluded: tuple[ClusterId, ...] = ()
    max_price: int | None = None
    """Billionths of `currency` per hour, for the whole request."""
    currency: str = ""
    """In which prices are compared; if none is named, a maximum is one of `prices.DEFAULT_CURRENCY`."""


UNCONSTRAINED = Constraints()
"""Most requests may go anywhere; they share this one."""


class Request(Record, frozen=True):
    """What a cluster asks for; every way of asking ends in this record."""

    requester: ClusterId
    resources: Resources
    duration: timedelta
    priority: int = 0
    wait: timedelta = timedelta()
    policy: str = "headroom"
    weights: dict[str, float] = {}
    constraints: Constraints = UNCONSTRAINED
    key: RequestKey | None = None


class Charge(Record, frozen=True):
    """What a reservation has cost at a provider that it has left."""

    since: datetime
    until: datetime
    hourly: int
    currency: str


class Reservation(Record, frozen=True):
    """One request and what became of it."""

    id: ReservationId
    request: Request
    created_at: datetime
    phase: Phase = Phase.PENDING
    reason: Reason = Reason.WAITING
    message: str = ""
    target: ClusterId | None = None
    left: tuple[ClusterId, ...] = ()
    """Providers it was placed on before: they refused, were drained or fell silent."""
    earmark: ClusterId | None = None
    """While waiting: the cluster whose capacity is kept for it, so that smaller requests cannot starve it."""
    ticket: int = 0
    """The revision of its creation: its place among waiters of the same priority."""
    wait_until: datetime | None = None
    reserved_at: datetime | None = None
    expires_at: datetime | None = None
    acknowledged_at: datetime | None = None
    activated_at: datetime | None = None
    finished_at: datetime | None = None
    hourly: int = 0
    """Billionths of `currency` per hour, as agreed when it was placed."""
    currency: str = ""
    """Empty while it is not placed, and where the provider asks for nothing."""
    charges: tuple[Charge, ...] = ()
    revision: int = 0

    @property
    def requester(self) -> ClusterId:
        return self.request.requester

    @property
    def touched(self) -> set[ClusterId]:
        """Every cluster that it concerns or has concerned."""
        touched = {self.requester, *self.left}
        if self.target is not None:
            touched.add(self.target)
        return touched

    @property
    def is_live(self) -> bool:
        """Whether it holds capacity on its target."""
        return self.phase in LIVE

    @property
    def deadline(self) -> datetime | None:
        """When the broker ends it by itself; None once it is finished."""
        return (
            self.wait_until
            if self.phase is Phase.PENDING
            else self.expires_at
            if self.is_live
            else None
        )
