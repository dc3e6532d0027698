"""Fixtures of the benchmarks: random but reproducible clusters and requests, certificates, and filled stores.

Cluster sizes follow what people run: many small clusters, few large ones, some with GPUs, most with prices,
a few cordoned or stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from random import Random

from msgspec.structs import replace

from kubelend.core.models import (
    REGION_LABEL,
    Advertisement,
    Cluster,
    ClusterId,
    Request,
)
from kubelend.core.prices import BILLIONTHS, Prices
from kubelend.core.resources import Resources

GIB, MIB = 2**30, 2**20
REQUESTER = ClusterId("requester")
DURATION = timedelta(hours=1)

_NODE_COUNTS = ((3, 40), (6, 30), (20, 20), (60, 8), (250, 2))
_CORES_PER_NODE = (4, 8, 16, 32, 64)
_GIB_PER_CORE = (2, 4, 8)
_REGIONS = ("eu-central", "eu-west", "us-east", "us-west", "ap-south")


def make_clusters(
    count: int, now: datetime, *, seed: int = 1, all_open: bool = False
) -> list[Cluster]:
    """Returns clusters ordered by ID, valid for a day. With `all_open`, none is cordoned or stale."""
    random = Random(seed)  # noqa: S311 - must be reproducible
    return [_make_cluster(cluster_name(number), now, random, all_open) for number in range(count)]


def cluster_name(number: int) -> ClusterId:
    """Returns names of equal length, so that they sort by number."""
    return ClusterId(f"cluster-{number:06d}")


def small_requests(count: int, *, seed: int = 2) -> list[Request]:
    """Returns requests for a few pods, which fit nearly every cluster."""
    random = Random(seed)  # noqa: S311 - as above
    return [
        _make_request(
            Resources(cpu=random.randint(1, 20) * 100, memory=random.randint(1, 32) * GIB // 8)
        )
        for _ in range(count)
    ]


def tiny_requests(count: int, *, seed: int = 5) -> list[Request]:
    """Returns requests so small that no run exhausts the fleet."""
    random = Random(seed)  # noqa: S311 - as above
    return [
        _make_request(Resources(cpu=random.randint(1, 9), memory=random.randint(1, 9) * MIB))
        for _ in range(count)
    ]


def large_requests(
    count: int, fleet: Sequence[Cluster], now: datetime, *, seed: int = 3
) -> list[Request]:
    """Returns requests for nearly all resources of one of the largest clusters; hardly any other fits."""
    random = Random(seed)  # noqa: S311 - as above
    usable = [one.ceiling for one in fleet if one.cordon is None and not one.is_stale(now)]
    freest = sorted(usable, key=lambda free: (free.gpu > 0, free.cpu), reverse=True)[:count]
    return [_make_request(_most_of(random.choice(freest))) for _ in range(count)]


def with_other_pods(cluster: Cluster) -> Cluster:
    """Returns the cluster with one pod of 100m CPU more, or less if it is full."""
    offer = cluster.advertisement
    change = Resources(cpu=100 if cluster.ceiling.cpu >= 100 else -100)
    return replace(cluster, advertisement=replace(offer, allocated=offer.allocated + change))


def _make_cluster(id: ClusterId, now: datetime, random: Random, all_open: bool) -> Cluster:
    allocatable = _random_size(random)
    used = random.uniform(0.15, 0.9)
    stale = random.random() < 0.02 and not all_open
    cordoned = random.random() < 0.02 and not all_open
    advertisement = Advertisement(
        cluster=id,
        capacity=_share(allocatable, 1.05),
        allocatable=allocatable,
        allocated=_share(allocatable, used),
        sent_at=now,
        name=f"Cluster {id}",
        prices=_random_prices(random) if random.random() < 0.7 else None,
        labels={REGION_LABEL: random.choice(_REGIONS), "tier": random.choice(("spot", "regular"))},
        endpoint=f"https://{id}.example.org:6443",
    )
    until = now - timedelta(minutes=1) if stale else now + timedelta(days=1)
    return Cluster(advertisement, now, until, "maintenance" if cordoned else None)


def _random_size(random: Random) -> Resources:
    sizes, weights = zip(*_NODE_COUNTS, strict=True)
    (nodes,) = random.choices(sizes, weights)
    cores, ratio = random.choice(_CORES_PER_NODE), random.choice(_GIB_PER_CORE)
    # The kubelet reserves a part of each node, so amounts are never round.
    return Resources(
        cpu=nodes * (cores * 1000 - random.randint(60, 200)),
        memory=nodes * (cores * ratio * GIB - random.randint(200_000, 900_000) * 1024),
        gpu=nodes * random.choice((1, 2, 4)) if random.random() < 0.15 else 0,
        storage=nodes * random.randint(50, 500) * GIB,
    )


def _share(amounts: Resources, share: float) -> Resources:
    return Resources(
        cpu=int(amounts.cpu * share),
        memory=int(amounts.memory * share) // 1024 * 1024,
        gpu=int(amounts.gpu * share),
        storage=int(amounts.storage * share) // 1024 * 1024,
    )


def _random_prices(random: Random) -> Prices:
    def cents(least: float, most: float) -> int:
        return round(random.uniform(least, most) * 1000) * BILLIONTHS // 1000

    return Prices("USD", cpu=cents(0.01, 0.09), memory=cents(0.001, 0.01), gpu=cents(0.4, 3))


def _most_of(free: Resources) -> Resources:
    most = _share(free, 0.9)
    return Resources(max(most.cpu, 1), max(most.memory, 1), most.gpu, most.storage)


def _make_request(wanted: Resources) -> Request:
    return Request(REQUESTER, wanted, DURATION)
