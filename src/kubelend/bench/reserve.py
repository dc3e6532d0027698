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
from kubelend.bench.connections import Answer, Connection
from kubelend.core.errors import UnexpectedAnswer
from kubelend.kits import clock
from kubelend.transports import tls

_SLICE_SECONDS = 0.5
_OK, _CREATED = 200, 201


class Result(msgspec.Struct, frozen=True):
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


def measure(clusters: int, connections: int, seconds: float) -> Result:
    """Runs for `seconds` in total, a third of it for each kind of request."""
    with trials.trial() as trial:
        progress.say("reserve: preparing the clusters")
        now = clock.utc_now()
        histories.write(trial.store, fleets.clusters(clusters, now, all_open=True), 0, now)
        certificates = [trial.certificate(f"requester-{n}") for n in range(connections)]
        with trial.broker("--rate-limit=0", "--log-level=info") as broker:
            broker.wait_until_ready()
            load = running.run(_load(broker.port, certificates, seconds))
        progress.say("reserve: auditing the store")
        violations = audits.violations(str(trial.store), load.reserved.answers)
        progress.done()
    return _result(clusters, connections, load, violations)


class Slices:
    """Results of all slices of one kind of request."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.rates: list[float] = []
        """Responses per second of each slice."""
        self.latencies: list[float] = []
        self.answers: list[bytes] = []

    @property
    def per_second(self) -> float:
        return timings.median(self.rates)


class Load:
    """Results of the whole run."""

    def __init__(self) -> None:
        self.reserved = Slices(_CREATED)
        self.constant = Slices(_CREATED)
        self.healthz = Slices(_OK)


class _Slice:
    """A time slice with one kind of request, sent as fast as the responses arrive."""

    def __init__(self, slices: Slices, seconds: float, busy: int) -> None:
        self._slices = slices
        self._seconds = seconds
        self._before = len(slices.latencies)
        self._end = time.perf_counter() + seconds
        self._patience = seconds + connections.PATIENCE
        self._busy = busy
        self._over = asyncio.get_running_loop().create_future()

    def drive(self, connection: Connection, request: Callable[[], bytes]) -> None:
        """Sends requests on one connection until the slice is over."""
        slices = self._slices
        sent = time.perf_counter()

        def answered(answer: Answer) -> None:
            nonlocal sent
            now = time.perf_counter()
            if answer.status != slices.expected:
                self._fail(UnexpectedAnswer(f"{answer.status}: {answer.body.decode()}"))
                return
            slices.answers.append(answer.body)
            if now >= self._end:
                self._rest()
                return
            slices.latencies.append(now - sent)
            sent = now
            connection.send(request())

        connection.on_answer, connection.on_lost = answered, self._fail
        connection.send(request())

    async def over(self) -> None:
        """Waits until all connections are idle. Responses after the end do not count for the rate."""
        async with asyncio.timeout(self._patience):
            await self._over
        answered = len(self._slices.latencies) - self._before
        self._slices.rates.append(answered / self._seconds)

    def _rest(self) -> None:
        self._busy -= 1
        if not self._busy and not self._over.done():
            self._over.set_result(None)

    def _fail(self, problem: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(problem)


async def _load(port: int, certificates: list[Path], seconds: float) -> Load:
    opened = [await connections.connect(port, tls.client_context(path)) for path in certificates]
    numbers = [0] * len(opened)
    builders = [
        requests.reservations(request, f"bench-{n}")
        for n, request in enumerate(fleets.tiny_requests(len(opened)))
    ]

    def reservation(index: int) -> bytes:
        numbers[index] += 1
        return builders[index](numbers[index])

    constants = [build(0) for build in builders]
    healthz = requests.healthz()
    load = Load()
    rounds = max(1, round(seconds / 3 / _SLICE_SECONDS))
    length = seconds / 3 / rounds

    async def run_slice(slices: Slices, request: Callable[[int], bytes], length: float) -> None:
        current = _Slice(slices, length, len(opened))
        for index, connection in enumerate(opened):
            current.drive(connection, partial(request, index))
        await current.over()

    # The first responses of a process are slow: they count for the audit only.
    warm_up = Load()
    await run_slice(warm_up.reserved, reservation, length / 2)
    await run_slice(warm_up.constant, constants.__getitem__, length / 2)
    load.reserved.answers = warm_up.reserved.answers
    for number in range(rounds):
        progress.say(f"reserve: round {number + 1} of {rounds}")
        await run_slice(load.reserved, reservation, length)
        await run_slice(load.constant, constants.__getitem__, length)
        await run_slice(load.healthz, lambda _: healthz, length)
    for connection in opened:
        connection.close()
    return load


def _result(clusters: int, connections: int, load: Load, violations: int) -> Result:
    reserved, constant = load.reserved, load.constant
    return Result(
        clusters=clusters,
        connections=connections,
        reservations=len(reserved.answers),
        reservations_per_s=round(reserved.per_second, 1),
        constant_per_s=round(constant.per_second, 1),
        ratio=round(reserved.per_second / constant.per_second, 3),
        healthz_per_s=round(load.healthz.per_second, 1),
        p50_ms=round(timings.percentile(reserved.latencies, 50) * 1000, 2),
        p99_ms=round(timings.percentile(reserved.latencies, 99) * 1000, 2),
        violations=violations,
    )
