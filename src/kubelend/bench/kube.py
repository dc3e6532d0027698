"""`kubelend dev bench kube`: a broker with a Kubernetes store, on a real API server.

The broker serves both interfaces; clusters advertise and requesters reserve over mutual TLS. Writes are
counted by the API server, from before the first reservation until no more are seen, so those of the
controllers are included. Then the idle broker is measured, which must not write at all. Finally a broker
starts with a large store.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from prometheus_client import parser

from kubelend.bench import broker as broker_bench
from kubelend.bench import fixtures, load, measure
from kubelend.bench.fixtures import FleetCertificates
from kubelend.bench.load import LoadConnections, LoadResult
from kubelend.bench.measure import BenchRun, Figures
from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.envtest import assets, servers, waiting
from kubelend.envtest.servers import LocalCluster
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
    # There are tens of thousands of lines, and the parser is slow: filter first.
    lines = [line for line in metrics.splitlines() if line.startswith(f"{_WRITES_METRIC}{{")]
    for family in parser.text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            labels = sample.labels
            if labels["verb"] in _WRITE_VERBS and labels["group"] in _API_GROUPS:
                part = f"/{labels['subresource']}" if labels["subresource"] else ""
                found[f"{labels['verb']} {labels['resource']}{part}"] += round(sample.value)
    return found


def writes_per_reservation(writes: Writes, reservations: int) -> dict[str, float]:
    """Returns writes per reservation, the largest first."""
    return {name: round(number / reservations, 3) for name, number in writes.most_common()}


_IDLE_AFTER = 3.0
"""Seconds without writes after which the broker counts as idle: longer than the controllers' delays."""
_IDLE_TIMEOUT = 60.0
_CREATED = 201


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


def missing_programs() -> str:
    """Returns why no API server can be started; empty if it can."""
    try:
        assets.locate_assets()
    except InvalidSettings as error:
        return str(error)
    return ""


def measure_kube(size: KubeSize) -> Figures:
    """Runs the benchmark; raises `InvalidSettings` if the programs are missing."""
    found = assets.find_assets()
    with (
        measure.run("kube") as run,
        servers.run_api_servers(found, run.deployment.directory / "lab", durable=True) as lab,
    ):
        run.progress("starting an API server")
        [cluster] = lab.start("bench")
        servers.install_crds(cluster)
        figures = _measure_load(run, _BrokerNamespace(cluster, "load"), size)
        history = _BrokerNamespace(cluster, "history")
        run.progress(f"writing {size.history:,} reservations")
        known = fixtures.make_clusters(size.advertisements)
        fixtures.fill_store(history.store, known, size.history)
        seconds = broker_bench.measure_start(run, size.history, *history.flags)
    return {
        "kubernetes": str(found.version),
        "clusters": size.clusters,
        "connections": size.connections,
        **figures,
        "advertisements": size.advertisements,
        "history": size.history,
        "start_seconds": seconds,
    }


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
        limit = _IDLE_TIMEOUT * waiting.FACTOR
        deadline = time.perf_counter() + limit
        before, now = Counter[str](), self.writes()
        while before != now:
            if time.perf_counter() > deadline:
                writes = (f"{number} {name}" for name, number in (now - before).most_common())
                raise Unavailable(
                    f"the broker still writes after {limit:g} s", hint=", ".join(writes)
                )
            time.sleep(_IDLE_AFTER)
            before, now = now, self.writes()
        return now


def _measure_load(run: BenchRun, home: _BrokerNamespace, size: KubeSize) -> Figures:
    certificates = [run.deployment.certificate(f"requester-{n}") for n in range(size.connections)]
    reserved = LoadResult(_CREATED)
    with run.broker(*home.flags) as broker:
        measure.run_on_uvloop(_advertise(run, broker.port, size.clusters))
        before = home.wait_idle()
        run.progress(f"{size.reservations:,} reservations")
        measure.run_on_uvloop(_reserve(broker.port, certificates, size.reservations, reserved))
        run.progress("waiting for the last writes")
        after = home.wait_idle()
        run.progress(f"measuring the idle broker for {size.idle_seconds:g} s")
        began = time.perf_counter()
        time.sleep(size.idle_seconds)
        idle, idle_seconds = home.writes() - after, time.perf_counter() - began
    run.progress("auditing the store")
    writes, count = after - before, len(reserved.responses)
    return {
        "reservations": count,
        "reservations_per_s": round(reserved.rates[0], 1),
        **measure.latency_figures(reserved.latencies),
        "writes_per_reservation": round(writes.total() / count, 3),
        "writes": writes_per_reservation(writes, count),
        "idle_seconds": round(idle_seconds, 1),
        "idle_writes_per_minute": round(60 * idle.total() / idle_seconds, 1),
        "violations": measure.count_violations(home.store, reserved.responses),
    }


async def _advertise(run: BenchRun, port: int, count: int) -> None:
    known = fixtures.make_clusters(count, all_open=True)
    identities = FleetCertificates(run, [cluster.id for cluster in known])
    pool = LoadConnections(port, identities.context)
    try:
        messages = [fixtures.advertisement_request(cluster) for cluster in known]
        await load.send_advertisements(pool, messages, run.progress)
    finally:
        pool.close()


async def _reserve(port: int, certificates: Sequence[Path], count: int, result: LoadResult) -> None:
    """Sends `count` reservations; those of the warm-up, one per connection, count for the audit only."""
    opened = await load.open_connections(port, certificates)
    wanted = fixtures.tiny_requests(len(opened) + count)
    messages = [fixtures.reservation_requests(one, "bench")(n) for n, one in enumerate(wanted)]
    # The first responses of a process are slow.
    warm_up = LoadResult(_CREATED)
    await load.send_all(opened, messages[: len(opened)], warm_up)
    await load.send_all(opened, messages[len(opened) :], result)
    result.responses += warm_up.responses
    for connection in opened:
        connection.close()
