"""`kubelend dev bench reserve`, `advertise`, `overload`, `decide` and `restart`: a broker with SQLite.

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

`overload` measures the latency of `GET /version` while another cluster sends the most expensive requests that
are allowed, route by route, as often as the default rate limit admits.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from kubelend.bench import fixtures, load, measure
from kubelend.bench.fixtures import FleetCertificates
from kubelend.bench.load import LoadConnection, LoadConnections, LoadResult
from kubelend.bench.measure import BenchRun, Figures, UsageWindow
from kubelend.core import decision
from kubelend.core.decision import Placement
from kubelend.core.errors import KubelendError
from kubelend.core.filters import PlacementQuery
from kubelend.core.fleet import Fleet
from kubelend.core.lifecycle import Role
from kubelend.core.models import Cluster, Request
from kubelend.envtest.processes import BrokerProcess
from kubelend.transports import tls

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
        if not isinstance(decision.decide_placement(query, fleet), Placement):
            raise KubelendError("a request fits nowhere; the benchmark would measure explanations")

    def decide_all() -> None:
        for query in queries:
            decision.decide_placement(query, fleet)

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
