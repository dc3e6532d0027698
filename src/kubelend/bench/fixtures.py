"""Fixtures of the benchmarks: random but reproducible clusters and requests, certificates, and filled stores.

Cluster sizes follow what people run: many small clusters, few large ones, some with GPUs, most with prices,
a few cordoned or stale.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec.structs import replace

from kubelend.bench.measure import BenchRun
from kubelend.core import lending
from kubelend.core.events import Change
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import (
    REGION_LABEL,
    Advertisement,
    Cluster,
    ClusterId,
    Request,
    RequestKey,
    Reservation,
    ReservationId,
)
from kubelend.core.prices import BILLIONTHS, Prices
from kubelend.core.resources import NOTHING, Resources
from kubelend.kits import clock
from kubelend.pki import files, identity, keys
from kubelend.pki.files import Credentials
from kubelend.stores import factory
from kubelend.transports import tls
from kubelend.wire import bodies, conversion, quantities, route, routes

GIB, MIB = 2**30, 2**20
REQUESTER = ClusterId("requester")
DURATION = timedelta(hours=1)

_NODE_COUNTS = ((3, 40), (6, 30), (20, 20), (60, 8), (250, 2))
_CORES_PER_NODE = (4, 8, 16, 32, 64)
_GIB_PER_CORE = (2, 4, 8)
_REGIONS = ("eu-central", "eu-west", "us-east", "us-west", "ap-south")


def make_clusters(
    count: int, now: datetime | None = None, *, seed: int = 1, all_open: bool = False
) -> list[Cluster]:
    """Returns clusters ordered by ID, valid for a day. With `all_open`, none is cordoned or stale."""
    random, now = Random(seed), now or clock.utc_now()  # noqa: S311 - must be reproducible
    return [_make_cluster(cluster_name(number), now, random, all_open) for number in range(count)]


def cluster_name(number: int) -> ClusterId:
    """Returns names of equal length, so that they sort by number."""
    return ClusterId(f"cluster-{number:06d}")


def small_requests(count: int, *, seed: int = 2) -> list[Request]:
    """Returns requests for a few pods, which fit nearly every cluster."""
    return _random_requests(count, seed, cpu=(20, 100), memory=(32, GIB // 8))


def tiny_requests(count: int, *, seed: int = 5) -> list[Request]:
    """Returns requests so small that no run exhausts the fleet."""
    return _random_requests(count, seed, cpu=(9, 1), memory=(9, MIB))


def large_requests(
    count: int, fleet: Sequence[Cluster], now: datetime, *, seed: int = 3
) -> list[Request]:
    """Returns requests for nearly all resources of one of the largest clusters; hardly any other fits."""
    random = Random(seed)  # noqa: S311 - as above
    usable = [one.ceiling for one in fleet if one.cordon is None and not one.is_stale(now)]
    freest = sorted(usable, key=lambda free: (free.gpu > 0, free.cpu), reverse=True)[:count]
    wanted = [_share(random.choice(freest), 0.9) for _ in range(count)]
    return [
        Request(REQUESTER, replace(one, cpu=max(one.cpu, 1), memory=max(one.memory, 1)), DURATION)
        for one in wanted
    ]


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


def _random_requests(
    count: int, seed: int, cpu: tuple[int, int], memory: tuple[int, int]
) -> list[Request]:
    """Returns requests for up to so many units of such a size."""
    random = Random(seed)  # noqa: S311 - must be reproducible

    def amount(most: int, unit: int) -> int:
        return random.randint(1, most) * unit

    return [
        Request(REQUESTER, Resources(cpu=amount(*cpu), memory=amount(*memory)), DURATION)
        for _ in range(count)
    ]


_COMMIT_SIZE = 2_000
_LIVE_SHARE = 5
"""One reservation in this many is live; the others have ended, but are still within their retention."""


def fill_store(
    store: Path | str, clusters: Sequence[Cluster], reservations: int, now: datetime | None = None
) -> None:
    """Creates a store with these clusters and a number of reservations."""
    changes = _make_changes(clusters, reservations, now or clock.utc_now())
    opened = factory.open_store(str(store))
    try:
        revision = 0
        while group := list(islice(changes, _COMMIT_SIZE)):
            revision += len(group)
            opened.commit(group, revision)
    finally:
        opened.close()


def _make_changes(
    clusters: Sequence[Cluster], reservations: int, now: datetime
) -> Iterator[Change]:
    random = Random(4)  # noqa: S311 - must be reproducible
    yield from clusters
    for number in range(reservations):
        revision = len(clusters) + number + 1
        yield _make_reservation(number, random.choice(clusters).id, revision, now, random)


def _make_reservation(
    number: int, provider: ClusterId, revision: int, now: datetime, random: Random
) -> Reservation:
    live = number % _LIVE_SHARE == 0
    age = timedelta(seconds=random.uniform(60, 1800))
    active = random.random() < 0.7
    return Reservation(
        id=ReservationId(f"rsv-{REQUESTER}-{number:013d}"),
        request=Request(
            requester=REQUESTER,
            resources=Resources(random.randint(1, 8) * 10, random.randint(1, 64) * MIB),
            duration=DURATION,
            key=RequestKey(f"request-{number}"),
        ),
        created_at=now - age,
        phase=(Phase.ACTIVE if active else Phase.RESERVED) if live else Phase.RELEASED,
        reason=(Reason.IN_USE if active else Reason.LOCKED) if live else Reason.BY_REQUESTER,
        message=f"Locked on {provider}" if live else f"Released by requester {REQUESTER}",
        target=provider,
        ticket=revision,
        reserved_at=now - age,
        expires_at=now - age + DURATION,
        acknowledged_at=now - age + timedelta(milliseconds=80),
        activated_at=now - age + timedelta(seconds=5) if active else None,
        finished_at=None if live else now - age + timedelta(seconds=40),
        revision=revision,
    )


_CERTIFICATE_LIFETIME = timedelta(days=1)


class FleetCertificates:
    """The certificates of clusters, in the forms that a client or a proxy presents."""

    def __init__(self, run: BenchRun, names: Sequence[ClusterId]) -> None:
        self._names = names
        self._authority = run.deployment.authority
        self._directory = run.deployment.directory / "fleet"
        self._key = keys.generate(keys.Algorithm.P256)
        self._certificates: list[x509.Certificate] = []
        now, public = clock.utc_now(), self._key.public_key()
        for number, name in enumerate(names):
            if number % 100 == 0:
                run.progress(f"{number:,} of {len(names):,} certificates")
            profile = identity.client_profile(name)
            signed = self._authority.sign(profile, public, _CERTIFICATE_LIFETIME, now=now)
            self._certificates.append(signed)

    def client_cert_header(self, number: int) -> bytes:
        """Returns the Client-Cert header value (RFC 9440) of a cluster."""
        return b":%s:" % base64.b64encode(self._certificates[number].public_bytes(Encoding.DER))

    def context(self, number: int) -> ssl.SSLContext:
        """Returns the TLS context of a cluster."""
        return tls.client_context(self.directory(number))

    def directory(self, number: int) -> Path:
        """Returns the directory with the certificate of a cluster."""
        directory = self._directory / self._names[number]
        if not directory.exists():
            shown = Credentials(
                self._certificates[number], self._key, (self._authority.certificate,)
            )
            files.save_credentials(directory, shown)
        return directory


_HOST_HEADER = b"Host: localhost\r\n"


def healthz_request() -> bytes:
    """Returns a GET of /healthz."""
    path = routes.ROUTES_BY_NAME["healthz"].path.encode()
    return b"GET %s HTTP/1.1\r\n%s\r\n" % (path, _HOST_HEADER)


def advertisement_request(cluster: Cluster, client_cert: bytes = b"") -> bytes:
    """Returns a POST of an advertisement, with a Client-Cert header if a proxy sends it."""
    header = (identity.CLIENT_CERT_HEADER, client_cert) if client_cert else None
    return _post_request("publish", conversion.from_cluster(cluster, NOTHING), header)


def reservation_requests(request: Request, keys: str) -> Callable[[int], bytes]:
    """Returns a function that builds the same request with a different idempotency key for each number."""
    body = bodies.ReservationRequest(
        requested_resources=quantities.to_quantities(request.resources),
        duration=f"{round(request.duration.total_seconds())}s",
    )
    header = (route.IDEMPOTENCY_KEY, b"%s-#" % keys.encode())
    before, after = _post_request("reserve", body, header).split(b"#", 1)

    def numbered(number: int) -> bytes:
        return b"%s%d%s" % (before, number, after)

    return numbered


def expensive_requests(name: str, count: int) -> dict[str, list[bytes]]:
    """Returns the most expensive requests that each route allows a cluster of this name, no two the same."""
    numbers = iter(range(1_000_000))

    def texts(each: int, form: str) -> list[str]:
        return [form.format(next(numbers)) for _ in range(each)]

    def labels() -> dict[str, str]:
        return dict.fromkeys(texts(bodies.MAX_LABELS, "l" * 240 + ".org/{:06}"), "v" * 253)

    def amounts() -> bodies.Quantities:
        names = texts(32, "x{}.example.org/" + "y" * 60)
        return bodies.Quantities("1m", "1Mi", extended=dict.fromkeys(names, "1"))

    def offer(**fields: Any) -> bytes:
        metrics = bodies.Metrics(fields.pop("capacity", bodies.Quantities("1", "1Gi")))
        return _post_request("publish", bodies.Advertisement(name, metrics, **fields), None)

    def patterns() -> list[str]:
        return texts(lending.MAX_PATTERNS, "{}-" + "?*" * 28)

    def policy(number: int) -> bytes:
        hours = [f"Mon-Sun {n}:{number % 60:02d}-{n + 1}:30 Europe/Rome" for n in range(16)]
        denied = patterns() + texts(256 - lending.MAX_PATTERNS, "n" * 247 + "{:06}")
        return offer(policy=bodies.LendingPolicy(allow=patterns(), deny=denied, hours=hours))

    def wanted(route: str) -> bytes:
        limits = bodies.Constraints(labels=labels(), exclude=texts(256, "n" * 247 + "{:06}"))
        return _post_request(route, bodies.ReservationRequest(amounts(), constraints=limits), None)

    def pages(path: bytes) -> bytes:
        return b"GET %s HTTP/1.1\r\n%s\r\n" % (path, _HOST_HEADER)

    builders: dict[str, Callable[[int], bytes]] = {
        "a lending policy": policy,
        "labels": lambda _: offer(labels=labels()),
        "extended resources": lambda _: offer(capacity=amounts()),
        "constraints": lambda _: wanted("reserve"),
        "explain": lambda _: wanted("explain").replace(b"/explain ", b"/explain?limit=100 ", 1),
        "a page of reservations": lambda _: pages(b"/api/v1/reservations?limit=1000"),
        "openapi": lambda _: pages(b"/openapi.json"),
    }
    return {what: [build(number) for number in range(count)] for what, build in builders.items()}


def version_request() -> bytes:
    return b"GET %s HTTP/1.1\r\n%s\r\n" % (
        routes.ROUTES_BY_NAME["version"].path.encode(),
        _HOST_HEADER,
    )


def _post_request(route: str, body: bodies.Body, header: tuple[str, bytes] | None) -> bytes:
    text, path = msgspec.json.encode(body), routes.ROUTES_BY_NAME[route].path.encode()
    more = b"%s: %s\r\n" % (header[0].encode(), header[1]) if header else b""
    return (
        b"POST %s HTTP/1.1\r\n%s%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (path, more, _HOST_HEADER, len(text), text)
    )
