"""`kubelend dev bench kube`: a broker with a Kubernetes store, on a real API server.

The broker serves both interfaces; clusters advertise and requesters reserve over mutual TLS. Writes are
counted by the API server, from before the first reservation until no more are seen, so those of the
controllers are included. Then the idle broker is measured, which must not write at all. Finally a broker
starts with a large store.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from prometheus_client import parser

from kubelend.bench import fixtures, measure
from kubelend.bench import load as bench_load
from kubelend.bench.fixtures import FleetCertificates
from kubelend.bench.load import Direct, ReservationLoad
from kubelend.core import models
from kubelend.core.errors import InvalidSettings, KubelendError, Unavailable
from kubelend.envtest import assets, processes, servers
from kubelend.envtest.processes import TemporaryDeployment
from kubelend.envtest.servers import LocalCluster
from kubelend.kits import clock
from kubelend.wire import broker_objects, objects

Writes = Counter[str]
"""Number by verb and resource, for example `PATCH reservations/status`."""

_WRITES_METRIC = "apiserver_request_total"
_WRITE_VERBS = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"})
_API_GROUPS = frozenset({broker_objects.GROUP, objects.GROUP, "", "events.k8s.io"})
"""API groups that a broker writes to. Leases, which have their own group, are not counted."""


def count_writes(metrics: str) -> Writes:
    """Returns all writes so far, including rejected ones, which are also work for the server."""
    found: Writes = Counter()
    for labels, value in _write_samples(metrics):
        if labels["verb"] in _WRITE_VERBS and labels["group"] in _API_GROUPS:
            found[_write_name(labels)] += round(value)
    return found


def writes_per_reservation(writes: Writes, reservations: int) -> dict[str, float]:
    """Returns writes per reservation, the largest first."""
    return {name: round(number / reservations, 3) for name, number in writes.most_common()}


def _write_samples(metrics: str) -> Iterator[tuple[Mapping[str, str], float]]:
    # There are tens of thousands of lines, and the parser is slow: filter first.
    lines = [line for line in metrics.splitlines() if line.startswith(f"{_WRITES_METRIC}{{")]
    for family in parser.text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            yield sample.labels, sample.value


def _write_name(labels: Mapping[str, str]) -> str:
    part = f"/{labels['subresource']}" if labels["subresource"] else ""
    return f"{labels['verb']} {labels['resource']}{part}"


_IDLE_AFTER = 3.0
"""Seconds without writes after which the broker counts as idle: longer than the controllers' delays."""
_IDLE_TIMEOUT = 60.0


class KubeSize(msgspec.Struct, frozen=True):
    """The size of a run."""

    clusters: int = 100
    connections: int = 32
    reservations: int = 1_000
    idle_seconds: float = 20.0
    advertisements: int = 1_000
    """Advertisements in the store at start-up."""
    history: int = 10_000
    """Reservations in the store at start-up."""


class KubeResult(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    kubernetes: str
    """Version of the API server."""
    clusters: int
    connections: int
    reservations: int
    reservations_per_s: float
    p50_ms: float
    p99_ms: float
    writes_per_reservation: float
    writes: dict[str, float]
    """Writes per reservation by verb and resource."""
    idle_seconds: float
    idle_writes_per_minute: float
    advertisements: int
    history: int
    start_seconds: float
    """From the start of the process until /readyz is ok."""
    violations: int


def missing_programs() -> str:
    """Returns why no API server can be started; empty if it can."""
    try:
        assets.locate_assets()
    except InvalidSettings as error:
        return str(error)
    return ""


def measure_kube(size: KubeSize) -> KubeResult:
    """Runs the benchmark; raises `InvalidSettings` if the programs are missing."""
    found = assets.find_assets()
    with (
        processes.temporary_deployment() as deployment,
        servers.run_api_servers(found, deployment.directory / "lab", durable=True) as lab,
    ):
        measure.show_progress("kube: starting an API server")
        [cluster] = lab.start("bench")
        servers.install_crds(cluster)
        use = _run_load(deployment, _BrokerNamespace(cluster, "load"), size)
        seconds = _measure_start(deployment, _BrokerNamespace(cluster, "history"), size)
    measure.clear_progress()
    return _result(str(found.version), size, use, seconds)


class _BrokerNamespace:
    """A namespace of the cluster with the store of one broker."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster = cluster
        self.store = f"kubernetes://{cluster.admin_kubeconfig}?namespace={namespace}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        cluster.call("POST", "/api/v1/namespaces", msgspec.json.encode(body))

    @property
    def flags(self) -> tuple[str, ...]:
        return f"--store={self.store}", "--broker-interface=http,kubernetes", "--rate-limit=0"

    def writes(self) -> Writes:
        return count_writes(self.cluster.call("GET", "/metrics").decode())

    def wait_idle(self) -> Writes:
        """Waits until nothing more is written; returns the writes so far."""
        deadline = time.perf_counter() + _IDLE_TIMEOUT
        before, now = Counter[str](), self.writes()
        while before != now:
            if time.perf_counter() > deadline:
                raise Unavailable(
                    f"the broker still writes after {_IDLE_TIMEOUT:g} s",
                    hint=_writes_text(now - before),
                )
            time.sleep(_IDLE_AFTER)
            before, now = now, self.writes()
        return now


class KubeLoad(msgspec.Struct, frozen=True):
    """The load, and the writes that it caused."""

    load: ReservationLoad
    writes: Writes
    idle_writes: Writes
    idle_seconds: float
    violations: int

    @property
    def reservations(self) -> int:
        return len(self.load.responses)


def _run_load(deployment: TemporaryDeployment, home: _BrokerNamespace, size: KubeSize) -> KubeLoad:
    certificates = [deployment.certificate(f"requester-{n}") for n in range(size.connections)]
    with deployment.broker(*home.flags) as broker:
        broker.wait_until_ready()
        _advertise_clusters(deployment, broker.port, size.clusters)
        before = home.wait_idle()
        measure.show_progress(f"kube: {size.reservations:,} reservations")
        load = bench_load.run_on_uvloop(
            bench_load.send_reservations(broker.port, certificates, size.reservations)
        )
        measure.show_progress("kube: waiting for the last writes")
        after = home.wait_idle()
        measure.show_progress(f"kube: measuring the idle broker for {size.idle_seconds:g} s")
        began = time.perf_counter()
        time.sleep(size.idle_seconds)
        idle, idle_seconds = home.writes() - after, time.perf_counter() - began
    measure.show_progress("kube: auditing the store")
    violations = measure.count_violations(home.store, load.responses)
    return KubeLoad(load, after - before, idle, idle_seconds, violations)


def _advertise_clusters(deployment: TemporaryDeployment, port: int, count: int) -> None:
    known = fixtures.make_clusters(count, clock.utc_now(), all_open=True)
    identities = FleetCertificates(deployment, [cluster.id for cluster in known])
    list(identities.issue())
    bench_load.run_on_uvloop(_advertise(Direct(port, identities.context), known))


async def _advertise(direct: Direct, known: Sequence[models.Cluster]) -> None:
    try:
        messages = [fixtures.advertisement_request(cluster) for cluster in known]
        await bench_load.send_advertisements(direct, messages, "kube")
    finally:
        direct.close()


def _measure_start(
    deployment: TemporaryDeployment, home: _BrokerNamespace, size: KubeSize
) -> float:
    measure.show_progress(f"kube: writing {size.history:,} reservations")
    now = clock.utc_now()
    fixtures.fill_store(
        home.store, fixtures.make_clusters(size.advertisements, now), size.history, now
    )
    measure.show_progress("kube: starting the broker")
    with deployment.broker(*home.flags) as broker:
        seconds = broker.wait_until_ready()
        if broker.loaded_reservations() != size.history:
            raise KubelendError(f"the broker loaded {broker.loaded_reservations()} reservations")
    return seconds


def _result(version: str, size: KubeSize, use: KubeLoad, seconds: float) -> KubeResult:
    latencies = use.load.latencies
    return KubeResult(
        kubernetes=version,
        clusters=size.clusters,
        connections=size.connections,
        reservations=use.reservations,
        reservations_per_s=round(use.load.per_second, 1),
        p50_ms=round(measure.percentile(latencies, 50) * 1000, 2),
        p99_ms=round(measure.percentile(latencies, 99) * 1000, 2),
        writes_per_reservation=round(use.writes.total() / use.reservations, 3),
        writes=writes_per_reservation(use.writes, use.reservations),
        idle_seconds=round(use.idle_seconds, 1),
        idle_writes_per_minute=round(60 * use.idle_writes.total() / use.idle_seconds, 1),
        advertisements=size.advertisements,
        history=size.history,
        start_seconds=round(seconds, 3),
        violations=use.violations,
    )


def _writes_text(writes: Writes) -> str:
    return ", ".join(f"{number} {name}" for name, number in writes.most_common())
