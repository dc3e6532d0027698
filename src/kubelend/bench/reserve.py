"""`kubelend dev bench reserve`: durable reservations per second over mutual TLS.

Time slices of reservations and of a constant request alternate on the same connections, so that other load
on the machine affects both; outliers do not move the median. The constant request repeats one reservation
with the same idempotency key: the broker parses, authenticates and answers it, but need not decide or write.
So the ratio is the cost of decision and durability relative to TLS, HTTP and JSON. Slices of `/healthz`, with
neither body nor JSON, are for comparison. Afterwards the store is audited; it must contain every confirmed
reservation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kubelend.apps import trials
from kubelend.bench import (
    audits,
    connections,
    fleets,
    histories,
    progress,
    requests,
    running,
    timings,
)
from kubelend.bench.connections import LoadConnection, RawResponse
from kubelend.core.errors import UnexpectedAnswer
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
    with trials.temporary_deployment() as trial:
        progress.show_progress("reserve: preparing the clusters")
        now = clock.utc_now()
        histories.fill_store(
            trial.store, fleets.make_clusters(clusters, now, all_open=True), 0, now
        )
        certificates = [trial.certificate(f"requester-{n}") for n in range(connections)]
        with trial.broker("--rate-limit=0", "--log-level=info") as broker:
            broker.wait_until_ready()
            load = running.run_on_uvloop(_run_load(broker.port, certificates, seconds))
        progress.show_progress("reserve: auditing the store")
        violations = audits.count_violations(str(trial.store), load.reserved.responses)
        progress.clear_progress()
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
        return timings.median(self.rates)


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
        self._patience = seconds + connections.RESPONSE_TIMEOUT
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
        await connections.open_connection(port, tls.client_context(path)) for path in certificates
    ]
    numbers = [0] * len(opened)
    builders = [
        requests.reservation_requests(request, f"bench-{n}")
        for n, request in enumerate(fleets.tiny_requests(len(opened)))
    ]

    def reservation(index: int) -> bytes:
        numbers[index] += 1
        return builders[index](numbers[index])

    constants = [build(0) for build in builders]
    healthz = requests.healthz_request()
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
        progress.show_progress(f"reserve: round {number + 1} of {rounds}")
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
        p50_ms=round(timings.percentile(reserved.latencies, 50) * 1000, 2),
        p99_ms=round(timings.percentile(reserved.latencies, 99) * 1000, 2),
        violations=violations,
    )
