"""`kubelend dev bench reserve`, `advertise`, `overload`, `decide`, `restart` and `kube`: the broker.

`reserve` measures durable reservations over mutual TLS. Time slices of reservations and of a constant
request alternate on the same connections, so that other load on the machine affects both; outliers do not
move the median. The constant request repeats one reservation with the same idempotency key: the broker
parses, authenticates and answers it, but need not decide or write. So the ratio is the cost of decision and
durability relative to TLS, HTTP and JSON. Slices of `/healthz`, with neither body nor JSON, are for
comparison. Afterwards the store is audited; it must contain every confirmed reservation.

`advertise` measures CPU and memory. Each cluster has its own certificate and advertises once per interval;
the advertisements are spread evenly over the interval, as those of agents are. They arrive directly or
through a simulated proxy that terminates TLS and forwards the client certificates (docs/adr/0009). The
window starts when every cluster has advertised once. The second advertisement differs from the first.

`kube` measures a broker with a Kubernetes store, on a real API server. It serves both interfaces. Writes are
counted by the API server, from before the first reservation until no more are seen, so those of the
controllers are included. Then the idle broker is measured, which must not write at all. The floor is what the
same API server can do in the same run without a broker: conditional writes of the last head one after the
other, and the objects of the broker, with their status, 16 at a time. Finally a broker starts with a large
store.

`overload` measures the latency of `GET /version` while another cluster sends the most expensive requests that
are allowed, route by route, as often as the default rate limit admits.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import parser

from kubelend.bench import fixtures, load, measure
from kubelend.bench.fixtures import FleetCertificates
from kubelend.bench.load import LoadConnection, LoadConnections, LoadResult
from kubelend.bench.measure import BenchRun, Figures, UsageWindow
from kubelend.core import explanations
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.core.explanations import Placement
from kubelend.core.filters import PlacementQuery
from kubelend.core.fleet import Fleet
from kubelend.core.lifecycle import Role
from kubelend.core.models import Cluster, Request
from kubelend.envtest import assets, servers, waiting
from kubelend.envtest.processes import BrokerProcess
from kubelend.envtest.servers import LocalCluster
from kubelend.kits import tasks
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.transports import tls
from kubelend.wire import broker_objects, objects

_SLICE_SECONDS = 0.5
_OK, _CREATED = 200, 201


def measure_reserve(clusters: int, connections: int, seconds: float) -> Figures:
    """Runs for `seconds` in total, a third of it for each kind of request."""
    reserved, constant, healthz = LoadResult(_CREATED), LoadResult(_CREATED), LoadResult(_OK)
    with measure.run("reserve") as run:
        store = run.deployment.store
        fixtures.fill_store(store, fixtures.make_clusters(clusters, all_open=True), 0)
        certificates = [run.deployment.certificate(f"requester-{n}") for n in range(connections)]
        with run.broker("--rate-limit=0", "--log-level=info") as broker:
            results = (reserved, constant, healthz)
            measure.run_on_uvloop(_send_slices(run, broker, certificates, results, seconds))
        run.progress("auditing the store")
        violations = measure.count_violations(str(store), reserved.responses)
    per_second, constant_per_second = map(statistics.median, (reserved.rates, constant.rates))
    return {
        "clusters": clusters,
        "connections": connections,
        "reservations": len(reserved.responses),
        "reservations_per_s": round(per_second, 1),
        "constant_per_s": round(constant_per_second, 1),
        "ratio": round(per_second / constant_per_second, 3),
        "healthz_per_s": round(statistics.median(healthz.rates), 1),
        **measure.latency_figures(reserved.latencies),
        "violations": violations,
    }


async def _send_slices(
    run: BenchRun,
    broker: BrokerProcess,
    certificates: list[Path],
    results: tuple[LoadResult, LoadResult, LoadResult],
    seconds: float,
) -> None:
    opened = await load.open_connections(broker.port, certificates)
    numbers = [0] * len(opened)
    builders = [
        fixtures.reservation_requests(request, f"bench-{n}")
        for n, request in enumerate(fixtures.tiny_requests(len(opened)))
    ]

    def reservation(index: int) -> bytes:
        numbers[index] += 1
        return builders[index](numbers[index])

    constants, healthz = [build(0) for build in builders], fixtures.healthz_request()
    requests: tuple[Callable[[int], bytes], ...] = (
        *(reservation, constants.__getitem__),
        lambda _: healthz,
    )
    rounds = max(1, round(seconds / 3 / _SLICE_SECONDS))
    length = seconds / 3 / rounds
    # The first responses of a process are slow: they count for the audit only.
    for request, result in zip(requests[:2], results, strict=False):
        warm_up = LoadResult(result.expected)
        await load.send_for(opened, request, length / 2, warm_up)
        result.responses += warm_up.responses
    for number in range(rounds):
        run.progress(f"round {number + 1} of {rounds}")
        for request, result in zip(requests, results, strict=True):
            await load.send_for(opened, request, length, result)
    for connection in opened:
        connection.close()


def measure_advertise(clusters: int, interval: float, seconds: float, *, direct: bool) -> Figures:
    """Measures for `seconds` after all clusters have advertised once."""
    measure.need_open_files(clusters if direct else 0, f"{clusters} connections")
    count = math.ceil(seconds * clusters / interval)
    with measure.run("advertise") as run:
        known = fixtures.make_clusters(clusters)
        identities = FleetCertificates(run, [cluster.id for cluster in known])

        def messages(clusters: Iterable[Cluster]) -> list[bytes]:
            return [
                fixtures.advertisement_request(
                    cluster, b"" if direct else identities.client_cert_header(number)
                )
                for number, cluster in enumerate(clusters)
            ]

        joining, news = messages(known), messages(map(fixtures.with_other_pods, known))
        proxy = tls.client_context(run.deployment.certificate("proxy", Role.PROXY))
        with run.broker("--rate-limit=0", *([] if direct else ["--trust-proxies"])) as broker:
            context = identities.context if direct else lambda _: proxy
            pool = LoadConnections(broker.port, context, shared=not direct)
            window = measure.run_on_uvloop(
                _advertise(run, broker.pid, pool, joining, news, count, seconds)
            )
    return {
        "clusters": clusters,
        "interval": interval,
        "direct": direct,
        "path": "direct" if direct else "by proxy",
        "advertisements": count,
        "advertisements_per_s": round(count / window.seconds, 1),
        **window.figures(),
    }


async def _advertise(
    run: BenchRun,
    broker: int,
    pool: LoadConnections,
    joining: list[bytes],
    news: list[bytes],
    count: int,
    seconds: float,
) -> UsageWindow:
    async def send(number: int) -> None:
        number %= len(news)
        await load.send_advertisement(pool, number, news[number])

    try:
        await load.send_advertisements(pool, joining, run.progress)
        return await run.send_evenly(broker, send, count, seconds)
    finally:
        pool.close()


_ATTACKERS = 4
"""Connections of the cluster that sends expensive requests, each after a pause."""
_PAUSE, _CALL_INTERVAL = 0.01, 0.02


def measure_overload(clusters: int, seconds: float) -> Figures:
    """Measures calls of one cluster while another sends what is most expensive, `seconds` for each route."""
    with measure.run("overload") as run:
        known = fixtures.make_clusters(clusters, all_open=True)
        fixtures.fill_store(run.deployment.store, known, 1_000)
        directories = [run.deployment.certificate(name) for name in (fixtures.REQUESTER, "other")]
        requests = fixtures.expensive_requests(fixtures.REQUESTER, 64)
        with run.broker() as broker:
            latencies = measure.run_on_uvloop(
                _call_under_load(run, broker.port, directories, requests, seconds)
            )
    found = {what: measure.latency_figures(each)["p99_ms"] for what, each in latencies.items()}
    worst = max(found, key=lambda what: found[what])
    return {"clusters": clusters, "p99_ms": found[worst], "worst": worst, "routes_p99_ms": found}


async def _call_under_load(
    run: BenchRun,
    port: int,
    directories: Sequence[Path],
    requests: Mapping[str, Sequence[bytes]],
    seconds: float,
) -> dict[str, list[float]]:
    attacker, other = (tls.client_context(directory) for directory in directories)
    caller, found = await load.open_connection(port, other), {}
    for what, messages in requests.items():
        run.progress(what)
        left = itertools.cycle(messages)
        opened = [await load.open_connection(port, attacker) for _ in range(_ATTACKERS)]
        attacks = [asyncio.create_task(_send_endlessly(each, left)) for each in opened]
        found[what] = await _measured_calls(caller, seconds)
        for task, connection in zip(attacks, opened, strict=True):
            task.cancel()
            connection.close()
        await asyncio.gather(*attacks, return_exceptions=True)
    caller.close()
    return found


async def _send_endlessly(connection: LoadConnection, messages: Iterator[bytes]) -> None:
    while True:
        await connection.call(next(messages))
        await asyncio.sleep(_PAUSE)


async def _measured_calls(connection: LoadConnection, seconds: float) -> list[float]:
    request, found = fixtures.version_request(), []
    for _ in range(max(1, round(seconds / _CALL_INTERVAL))):
        began = time.perf_counter()
        await connection.call(request)
        found.append(time.perf_counter() - began)
        await asyncio.sleep(_CALL_INTERVAL)
    return found


DECIDE_SIZES = (100, 1_000, 10_000, 100_000)
DECIDE_TARGET_SIZE = 10_000

_NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
_REQUEST_COUNT = 32


def measure_decide_sizes(sizes: Sequence[int]) -> Figures:
    """Measures several sizes; the top-level figures are those of the target's size, else of the first."""
    found = [measure_decide(size) for size in sizes]
    chosen = next((one for one in found if one["clusters"] == DECIDE_TARGET_SIZE), found[0])
    return {**chosen, "sizes": found}


def measure_decide(clusters: int) -> Figures:
    """Measures decisions on small and large requests over one random fleet, in microseconds."""
    measure.show_progress(f"decide: {clusters:,} clusters ...")
    known = fixtures.make_clusters(clusters, _NOW)
    fleet = Fleet(len(known))
    for cluster in known:
        fleet.put(cluster, cluster.ceiling.clamped())
    small = _decision_microseconds(fixtures.small_requests(_REQUEST_COUNT), fleet)
    large = _decision_microseconds(fixtures.large_requests(_REQUEST_COUNT, known, _NOW), fleet)
    measure.show_progress("")
    return {
        "clusters": clusters,
        "small_us": round(small, 2),
        "large_us": round(large, 2),
        "us_per_decision": round(max(small, large), 2),
    }


def _decision_microseconds(requests: list[Request], fleet: Fleet) -> float:
    queries = [PlacementQuery(request, _NOW) for request in requests]
    for query in queries:
        if not isinstance(explanations.decide_placement(query, fleet), Placement):
            raise KubelendError("a request fits nowhere; the benchmark would measure explanations")

    def decide_all() -> None:
        for query in queries:
            explanations.decide_placement(query, fleet)

    return measure.cpu_seconds_per_call(decide_all) / len(queries) * 1e6


_CLUSTER_COUNT = 1_000


def measure_restart(reservations: int, starts: int) -> Figures:
    """Fills the store once, and starts the broker several times; reports the median."""
    with measure.run("restart") as run:
        run.progress(f"writing {reservations:,} reservations")
        fixtures.fill_store(
            run.deployment.store, fixtures.make_clusters(_CLUSTER_COUNT), reservations
        )
        seconds = [measure_start(run, reservations) for _ in range(starts)]
    return {
        "reservations": reservations,
        "clusters": _CLUSTER_COUNT,
        "seconds": round(statistics.median(seconds), 3),
        "starts": seconds,
    }


def measure_start(run: BenchRun, reservations: int, *flags: str) -> float:
    """Returns the seconds from the start of a broker until /readyz is ok."""
    run.progress("starting the broker")
    with run.deployment.broker(*flags) as broker:
        seconds = broker.wait_until_ready()
        if broker.loaded_reservations() != reservations:
            raise KubelendError(f"the broker loaded {broker.loaded_reservations()} reservations")
    return round(seconds, 3)


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
_WRITTEN_POLL = 0.1
_FLOOR_WRITES = 100
_FLOOR_OBJECTS = 300
_CREATED = 201

JsonObject = dict[str, Any]


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
        home = _BrokerNamespace(cluster, "load")
        pids = {"api_server": cluster.pid, "etcd": lab.etcd.pid, "load": os.getpid()}
        figures = _measure_load(run, home, size, pids)
        run.progress("measuring the API server alone")
        floor = _BrokerNamespace(cluster, "floor")
        figures |= measure.run_on_uvloop(_measure_floor(home, floor))
        bare = figures["floor_reservations_per_s"]
        figures["ratio"] = round(figures["reservations_per_s"] / bare, 2)
        history = _BrokerNamespace(cluster, "history")
        run.progress(f"writing {size.history:,} reservations")
        known = fixtures.make_clusters(size.advertisements)
        fixtures.fill_store(history.store, known, size.history)
        seconds = measure_start(run, size.history, *history.flags)
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
        self.namespace = namespace
        self.store = f"kubernetes://{cluster.admin_kubeconfig}?namespace={namespace}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        cluster.call("POST", "/api/v1/namespaces", msgspec.json.encode(body))

    @property
    def flags(self) -> tuple[str, ...]:
        return f"--store={self.store}", "--broker-interface=http,kubernetes", "--rate-limit=0"

    def path(self, plural: str, name: str = "") -> str:
        version = f"{broker_objects.GROUP}/{objects.VERSION}"
        return f"/apis/{version}/namespaces/{self.namespace}/{plural}{name and '/'}{name}"

    def objects(self, plural: str) -> list[JsonObject]:
        listed: dict[str, Any] = msgspec.json.decode(self.cluster.call("GET", self.path(plural)))
        return list(listed["items"])

    def wait_written(self, plural: str, count: int) -> float:
        """Waits until so many objects have a record; returns how long that took."""
        began = time.perf_counter()
        while sum("record" in found.get("status", {}) for found in self.objects(plural)) < count:
            if time.perf_counter() - began > _IDLE_TIMEOUT * waiting.FACTOR:
                raise Unavailable("the broker has not written its objects")
            time.sleep(_WRITTEN_POLL)
        return time.perf_counter() - began

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


def _measure_load(
    run: BenchRun, home: _BrokerNamespace, size: KubeSize, pids: Mapping[str, int]
) -> Figures:
    certificates = [run.deployment.certificate(f"requester-{n}") for n in range(size.connections)]
    reserved = LoadResult(_CREATED)
    with run.broker(*home.flags) as broker:
        answered = measure.run_on_uvloop(_advertise_all(run, broker.port, size.clusters))
        written = answered + home.wait_written("clusteradvertisements", size.clusters)
        before = home.wait_idle()
        run.progress(f"{size.reservations:,} reservations")
        windows = {name: UsageWindow(pid) for name, pid in {**pids, "broker": broker.pid}.items()}
        measure.run_on_uvloop(_reserve(broker.port, certificates, size.reservations, reserved))
        for window in windows.values():
            window.sample()
        run.progress("waiting for the last writes")
        lag = home.wait_written("reservations", len(reserved.responses))
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
        "written_seconds_later": round(lag, 2),
        "cpu_percent": {name: one.figures()["cpu_percent"] for name, one in windows.items()},
        "advertisements_answered_seconds": round(answered, 2),
        "advertisements_written_seconds": round(written, 2),
        "writes_per_reservation": round(writes.total() / count, 3),
        "writes": writes_per_reservation(writes, count),
        "idle_seconds": round(idle_seconds, 1),
        "idle_writes_per_minute": round(60 * idle.total() / idle_seconds, 1),
        "violations": measure.count_violations(home.store, reserved.responses),
    }


async def _advertise_all(run: BenchRun, port: int, count: int) -> float:
    """Sends the first advertisements of these clusters; returns the seconds until all were answered."""
    known = fixtures.make_clusters(count, all_open=True)
    identities = FleetCertificates(run, [cluster.id for cluster in known])
    pool = LoadConnections(port, identities.context)
    try:
        messages = [fixtures.advertisement_request(cluster) for cluster in known]
        for number in range(count):
            identities.directory(number)
        began = time.perf_counter()
        await load.send_advertisements(pool, messages, run.progress)
        return time.perf_counter() - began
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


async def _measure_floor(home: _BrokerNamespace, floor: _BrokerNamespace) -> Figures:
    """What the API server takes for the same objects without a broker."""
    head = msgspec.json.decode(home.cluster.call("GET", home.path("ledgerrecords", "head")))
    reservations = home.objects("reservations")[:_FLOOR_OBJECTS]
    offers = home.objects("clusteradvertisements")
    async with Client.open(config.config_from_kubeconfig(floor.cluster.admin_kubeconfig)) as client:
        puts = await _seconds_to_replace(client, floor, head)
        created = await _seconds_to_create(client, floor, "reservations", reservations)
        offered = await _seconds_to_create(client, floor, "clusteradvertisements", offers)
    return {
        "floor_head_bytes": len(head["record"]["data"]),
        "floor_head_writes_per_s": round(_FLOOR_WRITES / puts, 1),
        "floor_reservations_per_s": round(len(reservations) / created, 1),
        "floor_advertisements_seconds": round(offered, 2),
    }


async def _seconds_to_replace(client: Client, floor: _BrokerNamespace, found: JsonObject) -> float:
    names = {"name": found["metadata"]["name"], "namespace": floor.namespace}
    sent = await client.raw("POST", floor.path("ledgerrecords"), {**found, "metadata": names})
    began = time.perf_counter()
    for number in range(_FLOOR_WRITES):
        metadata = msgspec.json.decode(sent)["metadata"]
        record = {**found["record"], "revision": number}
        body = {**found, "metadata": metadata, "record": record}
        sent = await client.raw("PUT", floor.path("ledgerrecords", "head"), body)
    return time.perf_counter() - began


async def _seconds_to_create(
    client: Client, floor: _BrokerNamespace, plural: str, found: Sequence[JsonObject]
) -> float:
    """Each as the store does: an object, and then its status."""

    async def create(one: JsonObject) -> None:
        kept = {name: one["metadata"].get(name) for name in ("name", "labels", "finalizers")}
        body = {**one, "metadata": kept}
        made = msgspec.json.decode(await client.raw("POST", floor.path(plural), body))
        path = f"{floor.path(plural, kept['name'])}/status"
        await client.raw("PUT", path, {**made, "status": one["status"]})

    began = time.perf_counter()
    await tasks.gather_limited(create, found)
    return time.perf_counter() - began
