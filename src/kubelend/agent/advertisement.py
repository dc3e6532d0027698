"""The advertisement: the body for the broker, the object for people, its schedule and when it is out of
date. Pure.

Each cluster advertises at its own wall-clock offset, derived from its ID: agents that were started
together do not call the broker together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from msgspec.structs import asdict, replace

from kubelend.core import durations
from kubelend.core.inventory import Totals
from kubelend.core.resources import Resources
from kubelend.wire import bodies, objects, quantities

MIN_VALIDITY: Final = timedelta(seconds=10)
"""Of the default validity: with short intervals one slow call would make the cluster stale."""

DECREASE_THRESHOLD_PERCENT: Final = 1
INCREASE_THRESHOLD_PERCENT: Final = 5
"""In percent of allocatable. A decrease is sent earlier than an increase, because the broker may
reserve what is no longer free."""

MAX_EXTENDED_RESOURCES: Final = 32
"""How many extended resources a body may have."""

_DIVISIBLE: Final = ("cpu", "memory", "storage")


class AdvertisementConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the advertisement: what is not measured, and how often it is sent."""

    cluster_id: str
    cluster_name: str = ""
    cost: bodies.Cost | None = None
    labels: dict[str, str] = {}
    region: str = ""
    policy: bodies.LendingPolicy | None = None
    """The lending policy; the broker applies it."""
    endpoint_url: str = ""
    interval: timedelta = timedelta(seconds=30)
    align: bool = False
    """Advertise at full intervals (10:00:00, 10:00:30) instead of at the cluster's own offset."""
    damping: timedelta = timedelta(seconds=2)
    """Minimum time between two advertisements after a change."""
    valid_for: timedelta = timedelta()
    """How long the advertisement is valid; zero for three intervals, ten seconds at least."""
    name: str = "cluster-advertisement"
    namespace: str = "default"

    @property
    def validity(self) -> timedelta:
        return self.valid_for or max(3 * self.interval, MIN_VALIDITY)

    def next_due(self, now: datetime) -> datetime:
        """When to advertise next, after an advertisement now.

        A due time that is almost reached counts as this one: a timer that fired slightly early must not
        cause two advertisements.
        """
        offset = advertising_offset(self.cluster_id, self.interval)
        earliest = now + max(self.damping, self.interval / 10)
        return next_scheduled(earliest, self.interval, NO_OFFSET if self.align else offset)

    def until_due(self, now: datetime) -> float:
        """Seconds until the next advertisement is due."""
        return (self.next_due(now) - now).total_seconds()


def advertisement_body(
    settings: AdvertisementConfig, measured: Totals, now: datetime
) -> bodies.Advertisement:
    """The request body for the broker."""
    measured = _limit_extended(measured)
    return bodies.Advertisement(
        cluster_id=settings.cluster_id,
        # The published broker refuses advertisements without a name or available resources.
        cluster_name=settings.cluster_name or settings.cluster_id,
        resources=bodies.Metrics(
            capacity=quantities.to_quantities(measured.capacity.clamped()),
            allocatable=quantities.to_quantities(measured.allocatable.clamped()),
            allocated=quantities.to_quantities(measured.allocated.clamped()),
            available=quantities.to_quantities(measured.free.clamped()),
        ),
        timestamp=now,
        cost=settings.cost,
        labels=settings.labels,
        region=settings.region,
        valid_for=durations.format_duration(settings.validity),
        endpoint_url=settings.endpoint_url,
        policy=settings.policy,
    )


def advertisement_object(
    settings: AdvertisementConfig,
    measured: Totals,
    now: datetime,
    available: bodies.Amounts | None,
) -> objects.Advertisement:
    """The local Advertisement object. Without the broker's `available` it is computed here."""
    measured = _limit_extended(measured)
    return objects.Advertisement(
        metadata=objects.Metadata(name=settings.name, namespace=settings.namespace),
        spec=objects.AdvertisementSpec(
            cluster_id=settings.cluster_id,
            resources=objects.MeasuredResources(
                capacity=_amounts_body(measured.capacity),
                allocatable=_amounts_body(measured.allocatable),
                allocated=_amounts_body(measured.allocated),
                available=_amounts_body(measured.free) if available is None else available,
                pending=_amounts_body(measured.pending),
                largest=_amounts_body(measured.largest),
            ),
            timestamp=now,
            cost=settings.cost,
        ),
    )


def is_significant_change(published: Totals, found: Totals) -> bool:
    """Whether a change has to be advertised now instead of at the next due time.

    Always for nodes, holds and devices; for other usage if it changes by a threshold, or if a resource
    becomes exhausted or available again.
    """
    if found.capacity != published.capacity or found.allocatable != published.allocatable:
        return True
    if _held_amounts(found) != _held_amounts(published):
        return True
    change = found.allocated - published.allocated
    return any(_is_significant(name, amount, published, found) for name, amount in change.items())


def _is_significant(name: str, change: int, published: Totals, found: Totals) -> bool:
    if name not in _DIVISIBLE:
        return True
    percent = DECREASE_THRESHOLD_PERCENT if change > 0 else INCREASE_THRESHOLD_PERCENT
    if abs(change) * 100 >= percent * found.allocatable.amount(name):
        return True
    return (published.free.amount(name) > 0) != (found.free.amount(name) > 0)


def _held_amounts(totals: Totals) -> Resources:
    return totals.allocatable - totals.allocated - totals.free


def _limit_extended(totals: Totals) -> Totals:
    """With at most as many extended resources as the API accepts: else all of it would be rejected."""
    names = totals.capacity.extended.keys() | totals.allocated.extended.keys()
    names |= totals.allocatable.extended.keys() | totals.pending.extended.keys()
    if len(names) <= MAX_EXTENDED_RESOURCES:
        return totals
    limited = set(sorted(totals.allocatable.extended)[:MAX_EXTENDED_RESOURCES])
    fields = ("capacity", "allocatable", "allocated", "pending", "largest", "free")
    return replace(totals, **{name: _only(getattr(totals, name), limited) for name in fields})


def _only(amounts: Resources, names: Set[str]) -> Resources:
    extended = {name: amount for name, amount in amounts.extended.items() if name in names}
    return replace(amounts, extended=extended)


def _amounts_body(found: Resources) -> bodies.Amounts:
    return bodies.Amounts(**asdict(quantities.to_quantities(found.clamped())))


NO_OFFSET: Final = timedelta()
"""No offset: intervals that divide a minute start at the full minute."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def advertising_offset(cluster: str, interval: timedelta) -> timedelta:
    """The cluster's offset within the interval: constant, and evenly distributed over clusters."""
    number = int.from_bytes(hashlib.sha256(cluster.encode()).digest(), "big")
    return number % (interval // _MICROSECOND) * _MICROSECOND


def next_scheduled(earliest: datetime, interval: timedelta, offset: timedelta) -> datetime:
    """The first scheduled time that is not before `earliest`."""
    since = earliest - _EPOCH - offset
    return earliest + (-since) % interval
