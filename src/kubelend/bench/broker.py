"""`kubelend dev bench reserve`, `decide` and `restart`: reservations per second, placement time, start time.

`reserve` measures durable reservations over mutual TLS. Time slices of reservations and of a constant
request alternate on the same connections, so that other load on the machine affects both; outliers do not
move the median. The constant request repeats one reservation with the same idempotency key: the broker
parses, authenticates and answers it, but need not decide or write. So the ratio is the cost of decision and
durability relative to TLS, HTTP and JSON. Slices of `/healthz`, with neither body nor JSON, are for
comparison. Afterwards the store is audited; it must contain every confirmed reservation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from kubelend.bench import fixtures, measure
from kubelend.bench import load as bench_load
from kubelend.bench.load import LoadConnection, RawResponse
from kubelend.core import decision
from kubelend.core.decision import Placement
from kubelend.core.errors import KubelendError, UnexpectedAnswer
from kubelend.core.filters import PlacementQuery
from kubelend.core.fleet import Fleet
from kubelend.core.models import Cluster, Request
from kubelend.envtest import processes
from kubelend.envtest.processes import TemporaryDeployment
from kubelend.kits import clock
from kubelend.transports import tls

_SLICE_SECONDS = 0.5
_OK, _CREATED = 200, 201


class ReserveResult(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    clusters: int
    connections: int
    reservations: int
    reservations_per_s: float
    constant_per_s: float
    ratio: float
    healthz_per_s: float
    p50_ms: float
    p99_ms: float
    violations: int


def measure_reserve(clusters: int, connections: int, seconds: float) -> ReserveResult:
    """Runs for `seconds` in total, a third of it for each kind of request."""
    with processes.temporary_deployment() as deployment:
        measure.show_progress("reserve: preparing the clusters")
        now = clock.utc_now()
        fixtures.fill_store(
            deployment.store, fixtures.make_clusters(clusters, now, all_open=True), 0, now
        )
        certificates = [deployment.certificate(f"requester-{n}") for n in range(connections)]
        with deployment.broker("--rate-limit=0", "--log-level=info") as broker:
            broker.wait_until_ready()
            load = bench_load.run_on_uvloop(_run_load(broker.port, certificates, seconds))
        measure.show_progress("reserve: auditing the store")
        violations = measure.count_violations(str(deployment.store), load.reserved.responses)
        measure.clear_progress()
    return _reserve_result(clusters, connections, load, violations)


class SliceResults:
    """Results of all slices of one kind of request."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.rates: list[float] = []
        """Responses per second of each slice."""
        self.latencies: list[float] = []
        self.responses: list[bytes] = []

    @property
    def per_second(self) -> float:
        return measure.median(self.rates)


class ReserveLoad:
    """Results of the whole run."""

    def __init__(self) -> None:
        self.reserved = SliceResults(_CREATED)
        self.constant = SliceResults(_CREATED)
        self.healthz = SliceResults(_OK)


class _Slice:
    """A time slice with one kind of request, sent as fast as the responses arrive."""

    def __init__(self, slices: SliceResults, seconds: float, busy: int) -> None:
        self._slices = slices
        self._seconds = seconds
        self._before = len(slices.latencies)
        self._end = time.perf_counter() + seconds
        self._patience = seconds + bench_load.RESPONSE_TIMEOUT
        self._busy = busy
        self._done = asyncio.get_running_loop().create_future()

    def drive(self, connection: LoadConnection, request: Callable[[], bytes]) -> None:
        """Sends requests on one connection until the slice is over."""
        slices = self._slices
        sent = time.perf_counter()

        def answered(answer: RawResponse) -> None:
            nonlocal sent
            now = time.perf_counter()
            if answer.status != slices.expected:
                self._fail(UnexpectedAnswer(f"{answer.status}: {answer.body.decode()}"))
                return
            slices.responses.append(answer.body)
            if now >= self._end:
                self._on_idle()
                return
            slices.latencies.append(now - sent)
            sent = now
            connection.send(request())

        connection.on_response, connection.on_lost = answered, self._fail
        connection.send(request())

    async def wait(self) -> None:
        """Waits until all connections are idle. Responses after the end do not count for the rate."""
        async with asyncio.timeout(self._patience):
            await self._done
        answered = len(self._slices.latencies) - self._before
        self._slices.rates.append(answered / self._seconds)

    def _on_idle(self) -> None:
        self._busy -= 1
        if not self._busy and not self._done.done():
            self._done.set_result(None)

    def _fail(self, problem: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(problem)


async def _run_load(port: int, certificates: list[Path], seconds: float) -> ReserveLoad:
    opened = [
        await bench_load.open_connection(port, tls.client_context(path)) for path in certificates
    ]
    numbers = [0] * len(opened)
    builders = [
        fixtures.reservation_requests(request, f"bench-{n}")
        for n, request in enumerate(fixtures.tiny_requests(len(opened)))
    ]

    def reservation(index: int) -> bytes:
        numbers[index] += 1
        return builders[index](numbers[index])

    constants = [build(0) for build in builders]
    healthz = fixtures.healthz_request()
    load = ReserveLoad()
    rounds = max(1, round(seconds / 3 / _SLICE_SECONDS))
    length = seconds / 3 / rounds

    async def run_slice(
        slices: SliceResults, request: Callable[[int], bytes], length: float
    ) -> None:
        current = _Slice(slices, length, len(opened))
        for index, connection in enumerate(opened):
            current.drive(connection, partial(request, index))
        await current.wait()

    # The first responses of a process are slow: they count for the audit only.
    warm_up = ReserveLoad()
    await run_slice(warm_up.reserved, reservation, length / 2)
    await run_slice(warm_up.constant, constants.__getitem__, length / 2)
    load.reserved.responses = warm_up.reserved.responses
    for number in range(rounds):
        measure.show_progress(f"reserve: round {number + 1} of {rounds}")
        await run_slice(load.reserved, reservation, length)
        await run_slice(load.constant, constants.__getitem__, length)
        await run_slice(load.healthz, lambda _: healthz, length)
    for connection in opened:
        connection.close()
    return load


def _reserve_result(
    clusters: int, connections: int, load: ReserveLoad, violations: int
) -> ReserveResult:
    reserved, constant = load.reserved, load.constant
    return ReserveResult(
        clusters=clusters,
        connections=connections,
        reservations=len(reserved.responses),
        reservations_per_s=round(reserved.per_second, 1),
        constant_per_s=round(constant.per_second, 1),
        ratio=round(reserved.per_second / constant.per_second, 3),
        healthz_per_s=round(load.healthz.per_second, 1),
        p50_ms=round(measure.percentile(reserved.latencies, 50) * 1000, 2),
        p99_ms=round(measure.percentile(reserved.latencies, 99) * 1000, 2),
        violations=violations,
    )


DECIDE_SIZES = (100, 1_000, 10_000, 100_000)
DECIDE_TARGET_SIZE = 10_000

_NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
_REQUEST_COUNT = 32
_ROUNDS = 9
_ROUND_SECONDS = 0.03


class DecideResult(msgspec.Struct, frozen=True):
    """Microseconds per decision; the keys are API."""

    clusters: int
    small_us: float
    large_us: float
    us_per_decision: float
    """The maximum of both."""


class DecideResults(DecideResult, frozen=True):
    """Results of several sizes; the top-level figures are those of the target's size, else of the first."""

    sizes: tuple[DecideResult, ...] = ()


def measure_decide_sizes(sizes: Sequence[int]) -> DecideResults:
    found = tuple(measure_decide(size) for size in sizes)
    chosen = next((one for one in found if one.clusters == DECIDE_TARGET_SIZE), found[0])
    return DecideResults(**msgspec.structs.asdict(chosen), sizes=found)


def measure_decide(clusters: int) -> DecideResult:
    """Measures decisions on small and large requests over one random fleet."""
    measure.show_progress(f"decide: {clusters:,} clusters")
    known = fixtures.make_clusters(clusters, _NOW)
    fleet = _make_fleet(known)
    small = _decision_microseconds(fixtures.small_requests(_REQUEST_COUNT), fleet)
    large = _decision_microseconds(fixtures.large_requests(_REQUEST_COUNT, known, _NOW), fleet)
    measure.clear_progress()
    return DecideResult(clusters, round(small, 2), round(large, 2), round(max(small, large), 2))


def _make_fleet(known: list[Cluster]) -> Fleet:
    fleet = Fleet(len(known))
    for cluster in known:
        fleet.put(cluster, cluster.ceiling.clamped())
    return fleet


def _decision_microseconds(requests: list[Request], fleet: Fleet) -> float:
    queries = [PlacementQuery(request, _NOW) for request in requests]
    for query in queries:
        if not isinstance(decision.decide_placement(query, fleet), Placement):
            raise KubelendError("a request fits nowhere; the benchmark would measure explanations")

    def decide_all() -> None:
        for query in queries:
            decision.decide_placement(query, fleet)

    calls = measure.calls_within(decide_all, _ROUND_SECONDS)
    seconds = measure.seconds_per_call(decide_all, calls, _ROUNDS)
    return seconds / len(queries) * 1e6


_CLUSTER_COUNT = 1_000


class RestartResult(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    reservations: int
    clusters: int
    seconds: float
    """From the start of the process until /readyz is ok; median of all starts."""
    starts: list[float]


def measure_restart(reservations: int, starts: int) -> RestartResult:
    """Fills the store once, and starts the broker several times."""
    with processes.temporary_deployment() as deployment:
        measure.show_progress(f"restart: writing {reservations:,} reservations")
        now = clock.utc_now()
        known = fixtures.make_clusters(_CLUSTER_COUNT, now)
        fixtures.fill_store(deployment.store, known, reservations, now)
        seconds = [
            _measure_start(deployment, reservations, number) for number in range(1, starts + 1)
        ]
    measure.clear_progress()
    return RestartResult(reservations, _CLUSTER_COUNT, round(measure.median(seconds), 3), seconds)


def _measure_start(deployment: TemporaryDeployment, reservations: int, number: int) -> float:
    measure.show_progress(f"restart: start {number}")
    with deployment.broker() as broker:
        seconds = broker.wait_until_ready()
        if broker.loaded_reservations() != reservations:
            raise KubelendError(f"the broker loaded {broker.loaded_reservations()} reservations")
    return round(seconds, 3)
