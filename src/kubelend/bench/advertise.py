"""`kubelend dev bench advertise`: CPU and memory of a broker with many clusters.

Each cluster has its own certificate and advertises once per interval; the advertisements are spread evenly
over the interval, as those of agents are. They arrive directly or through a simulated proxy that terminates
TLS and forwards the client certificates (docs/adr/0009). CPU and memory are read from the kernel, over a
window that starts when every cluster has advertised once. The second advertisement differs from the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kubelend.bench import fixtures, measure
from kubelend.bench import load as bench_load
from kubelend.bench.fixtures import FleetCertificates
from kubelend.bench.load import ConnectionStrategy, Direct, Proxied
from kubelend.bench.measure import UsageWindow
from kubelend.core.errors import InvalidInput
from kubelend.core.lifecycle import Role
from kubelend.core.models import Cluster
from kubelend.envtest import processes
from kubelend.envtest.processes import BrokerProcess, TemporaryDeployment
from kubelend.kits import clock
from kubelend.transports import tls

_SPARE_FILES = 100


class AdvertiseResult(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    clusters: int
    interval: float
    direct: bool
    path: str
    """`direct` or `by proxy`."""
    advertisements: int
    advertisements_per_s: float
    cpu_percent: float
    """Percent of one core."""
    rss_mb: float
    """Peak resident memory in MB (10^6 bytes)."""


def measure_advertise(
    clusters: int, interval: float, seconds: float, *, direct: bool
) -> AdvertiseResult:
    """Measures for `seconds` after all clusters have advertised once."""
    if measure.raise_open_files() < clusters + _SPARE_FILES and direct:
        raise InvalidInput(f"{clusters} connections exceed the limit of open files (`ulimit -Hn`)")
    with processes.temporary_deployment() as deployment:
        known = fixtures.make_clusters(clusters, clock.utc_now())
        identities = _issue_certificates(deployment, known)
        joining = _messages(known, identities, direct)
        news = _messages(map(fixtures.with_other_pods, known), identities, direct)
        proxy = tls.client_context(deployment.certificate("proxy", Role.PROXY))
        with deployment.broker(
            "--rate-limit=0", *([] if direct else ["--trust-proxies"])
        ) as broker:
            broker.wait_until_ready()
            strategy = (
                Direct(broker.port, identities.context) if direct else Proxied(broker.port, proxy)
            )
            load = bench_load.run_on_uvloop(
                _run_load(strategy, broker, joining, news, interval, seconds)
            )
    measure.clear_progress()
    return load.result(clusters, interval, direct)


def _issue_certificates(deployment: TemporaryDeployment, known: list[Cluster]) -> FleetCertificates:
    identities = FleetCertificates(deployment, [cluster.id for cluster in known])
    for number in identities.issue():
        if number % 100 == 0:
            measure.show_progress(f"advertise: {number:,} of {len(known):,} certificates")
    return identities


def _messages(
    clusters: Iterable[Cluster], identities: FleetCertificates, direct: bool
) -> list[bytes]:
    return [
        fixtures.advertisement_request(
            cluster, b"" if direct else identities.client_cert_header(number)
        )
        for number, cluster in enumerate(clusters)
    ]


class AdvertiseLoad(NamedTuple):
    """The number of advertisements sent, and the resource usage of the broker."""

    sent: int
    window: UsageWindow

    def result(self, clusters: int, interval: float, direct: bool) -> AdvertiseResult:
        return AdvertiseResult(
            clusters=clusters,
            interval=interval,
            direct=direct,
            path="direct" if direct else "by proxy",
            advertisements=self.sent,
            advertisements_per_s=round(self.sent / self.window.seconds, 1),
            cpu_percent=self.window.cpu_percent,
            rss_mb=self.window.rss_mb,
        )


async def _run_load(
    strategy: ConnectionStrategy,
    broker: BrokerProcess,
    joining: list[bytes],
    news: list[bytes],
    interval: float,
    seconds: float,
) -> AdvertiseLoad:
    try:
        await bench_load.send_advertisements(strategy, joining, "advertise")
        return await _advertise(strategy, broker, news, interval, seconds)
    finally:
        strategy.close()


async def _advertise(
    strategy: ConnectionStrategy,
    broker: BrokerProcess,
    messages: list[bytes],
    interval: float,
    seconds: float,
) -> AdvertiseLoad:
    """Sends at a constant rate, without waiting for responses (open loop)."""
    window, sent = UsageWindow(broker.pid), 0
    begin = sampled = time.perf_counter()
    gap = interval / len(messages)
    async with asyncio.TaskGroup() as group:
        while (due := begin + sent * gap) < begin + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            number = sent % len(messages)
            group.create_task(bench_load.send_advertisement(strategy, number, messages[number]))
            sent += 1
            if due - sampled >= measure.SAMPLE_SECONDS:
                sampled = due
                window.sample()
                measure.show_progress(f"advertise: {due - begin:.0f} of {seconds:.0f} s measured")
    window.sample()
    return AdvertiseLoad(sent, window)
