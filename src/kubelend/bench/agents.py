"""`kubelend dev bench agents` and `kubelend dev bench deliver`: many agents, and the latency of instructions.

`agents` measures CPU and memory of a broker with many agents, and whether every instruction is delivered.
Every agent has its own certificate, stream and components; all run in one process, the broker in another.
While all of them advertise, a requester reserves from each in turn and releases a little later. At the end
every reservation must have become an object in the right cluster, and every release must have arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kubelend.apps import trials
from kubelend.apps.trials import Trial
from kubelend.bench import crowds, fleets, processes, progress, running, timings, windows
from kubelend.bench.crowds import Member
from kubelend.bench.deliveries import Deliveries
from kubelend.bench.identities import Identities
from kubelend.bench.windows import Window
from kubelend.core.errors import InvalidInput, UnexpectedAnswer
from kubelend.core.lifecycle import Phase
from kubelend.kits import logs
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies

LEAST_RATE = 20.0
"""Minimum of reservations per second; higher if the window is too short to reach every agent."""

_HELD_FOR = 3.0
_PATIENCE = 10.0
"""Seconds to wait for outstanding instructions after the last release."""
_FILES_EACH = 4
_SPARE_FILES = 100
_AMOUNTS = bodies.Quantities("100m", "64Mi")


class Result(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    count: int
    reservations: int
    missed: int
    """Holds and withdrawals that did not reach their cluster."""
    cpu_percent: float
    """CPU of the broker in percent of one core."""
    rss_mb: float
    """Peak resident memory of the broker in MB (10^6 bytes)."""
    p50_ms: float
    p99_ms: float
    """From the requester's response to the provider's object. All agents share the CPU of one process."""


class Load(NamedTuple):
    """The deliveries, and the resource usage of the broker."""

    deliveries: Deliveries
    window: Window


def measure(count: int, seconds: float) -> Result:
    """Measures for `seconds`, after all agents are ready."""
    if processes.allow_many_files() < _FILES_EACH * count + _SPARE_FILES:
        raise InvalidInput(
            f"the connections of {count} agents exceed the limit of open files (`ulimit -Hn`)"
        )
    # Only errors of the agents are of interest here.
    logs.setup("error", "console")
    with trials.trial() as trial:
        members = _members(trial, count)
        with trial.broker("--rate-limit=0") as broker:
            broker.wait_until_ready()
            client = BrokerClient(broker.url, trial.certificate(fleets.REQUESTER))
            load = running.run(_load(broker.url, members, client, broker.pid, seconds))
    progress.done()
    return _result(count, load)


def _members(trial: Trial, count: int) -> list[Member]:
    names = [fleets.name(number) for number in range(count)]
    identities = Identities(trial, names)
    for number in identities.issue():
        if number % 100 == 0:
            progress.say(f"agents: {number:,} of {count:,} certificates")
    return [Member(name, identities.directory(number)) for number, name in enumerate(names)]


async def _load(
    url: str, members: Sequence[Member], client: BrokerClient, broker: int, seconds: float
) -> Load:
    deliveries = Deliveries()
    async with crowds.joined(url, members, deliveries), client:
        names = [member.name for member in members]
        window = await _borrow(client, names, deliveries, Window(broker), seconds)
        await _settled(deliveries)
    return Load(deliveries, window)


async def _borrow(
    client: BrokerClient,
    names: Sequence[str],
    deliveries: Deliveries,
    window: Window,
    seconds: float,
) -> Window:
    """Reserves from each cluster in turn at a constant rate, without waiting for responses (open loop)."""
    rate = max(LEAST_RATE, len(names) / seconds)
    begin = sampled = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(_loan(client, names[number % len(names)], deliveries))
            if due - sampled >= windows.SAMPLE_SECONDS:
                sampled = due
                window.sample()
                progress.say(f"agents: {due - begin:.0f} of {seconds:.0f} s measured")
        window.sample()
    return window


async def _loan(client: BrokerClient, provider: str, deliveries: Deliveries) -> None:
    request = bodies.ReservationRequest(_AMOUNTS, target_cluster_id=provider)
    answer = await client.reserve(request)
    if answer.status.phase != Phase.RESERVED:
        raise UnexpectedAnswer(f"reservation from {provider} failed: {answer.status.message}")
    deliveries.promised(answer)
    await asyncio.sleep(_HELD_FOR)
    await client.release(answer.id)
    deliveries.released(answer.id)


async def _settled(deliveries: Deliveries) -> None:
    """Waits until all instructions have been delivered, or the timeout."""
    deadline = time.perf_counter() + _PATIENCE
    while deliveries.missed and time.perf_counter() < deadline:
        progress.say("agents: waiting for the last instructions")
        await asyncio.sleep(0.05)


def _result(count: int, load: Load) -> Result:
    seconds = load.deliveries.seconds
    return Result(
        count=count,
        reservations=load.deliveries.count,
        missed=load.deliveries.missed,
        cpu_percent=load.window.cpu_percent,
        rss_mb=load.window.rss_mb,
        p50_ms=round(timings.percentile(seconds, 50) * 1000, 2),
        p99_ms=round(timings.percentile(seconds, 99) * 1000, 2),
    )
