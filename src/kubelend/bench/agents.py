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
from kubelend.apps.trials import TemporaryDeployment
from kubelend.bench import crowds, fleets, processes, progress, running, timings, windows
from kubelend.bench.crowds import AgentIdentity
from kubelend.bench.deliveries import DeliveryTracker
from kubelend.bench.identities import FleetCertificates
from kubelend.bench.windows import UsageWindow
from kubelend.core.errors import InvalidInput, UnexpectedAnswer
from kubelend.core.lifecycle import Phase
from kubelend.kits import logs
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies

MIN_RATE = 20.0
"""Minimum of reservations per second; higher if the window is too short to reach every agent."""

_HOLD_SECONDS = 3.0
_DELIVERY_GRACE = 10.0
"""Seconds to wait for outstanding instructions after the last release."""
_FILES_PER_AGENT = 4
_SPARE_FILES = 100
_AMOUNTS = bodies.Quantities("100m", "64Mi")


class AgentsResult(msgspec.Struct, frozen=True):
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


class AgentsLoad(NamedTuple):
    """The deliveries, and the resource usage of the broker."""

    deliveries: DeliveryTracker
    window: UsageWindow


def measure_agents(count: int, seconds: float) -> AgentsResult:
    """Measures for `seconds`, after all agents are ready."""
    if processes.raise_open_files() < _FILES_PER_AGENT * count + _SPARE_FILES:
        raise InvalidInput(
            f"the connections of {count} agents exceed the limit of open files (`ulimit -Hn`)"
        )
    # Only errors of the agents are of interest here.
    logs.setup("error", "console")
    with trials.temporary_deployment() as trial:
        members = _issue_identities(trial, count)
        with trial.broker("--rate-limit=0") as broker:
            broker.wait_until_ready()
            client = BrokerClient(broker.url, trial.certificate(fleets.REQUESTER))
            load = running.run_on_uvloop(
                _run_load(broker.url, members, client, broker.pid, seconds)
            )
    progress.clear_progress()
    return _agents_result(count, load)


def _issue_identities(trial: TemporaryDeployment, count: int) -> list[AgentIdentity]:
    names = [fleets.cluster_name(number) for number in range(count)]
    identities = FleetCertificates(trial, names)
    for number in identities.issue():
        if number % 100 == 0:
            progress.show_progress(f"agents: {number:,} of {count:,} certificates")
    return [AgentIdentity(name, identities.directory(number)) for number, name in enumerate(names)]


async def _run_load(
    url: str, members: Sequence[AgentIdentity], client: BrokerClient, broker: int, seconds: float
) -> AgentsLoad:
    deliveries = DeliveryTracker()
    async with crowds.run_agents(url, members, deliveries), client:
        names = [member.name for member in members]
        window = await _reserve_in_turn(client, names, deliveries, UsageWindow(broker), seconds)
        await _wait_delivered(deliveries)
    return AgentsLoad(deliveries, window)


async def _reserve_in_turn(
    client: BrokerClient,
    names: Sequence[str],
    deliveries: DeliveryTracker,
    window: UsageWindow,
    seconds: float,
) -> UsageWindow:
    """Reserves from each cluster in turn at a constant rate, without waiting for responses (open loop)."""
    rate = max(MIN_RATE, len(names) / seconds)
    begin = sampled = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(_reserve_and_release(client, names[number % len(names)], deliveries))
            if due - sampled >= windows.SAMPLE_SECONDS:
                sampled = due
                window.sample()
                progress.show_progress(f"agents: {due - begin:.0f} of {seconds:.0f} s measured")
        window.sample()
    return window


async def _reserve_and_release(
    client: BrokerClient, provider: str, deliveries: DeliveryTracker
) -> None:
    request = bodies.ReservationRequest(_AMOUNTS, target_cluster_id=provider)
    answer = await client.reserve(request)
    if answer.status.phase != Phase.RESERVED:
        raise UnexpectedAnswer(f"reservation from {provider} failed: {answer.status.message}")
    deliveries.on_reserved(answer)
    await asyncio.sleep(_HOLD_SECONDS)
    await client.release(answer.id)
    deliveries.on_released(answer.id)


async def _wait_delivered(deliveries: DeliveryTracker) -> None:
    """Waits until all instructions have been delivered, or the timeout."""
    deadline = time.perf_counter() + _DELIVERY_GRACE
    while deliveries.missed and time.perf_counter() < deadline:
        progress.show_progress("agents: waiting for the last instructions")
        await asyncio.sleep(0.05)


def _agents_result(count: int, load: AgentsLoad) -> AgentsResult:
    seconds = load.deliveries.latencies
    return AgentsResult(
        count=count,
        reservations=load.deliveries.count,
        missed=load.deliveries.missed,
        cpu_percent=load.window.cpu_percent,
        rss_mb=load.window.rss_mb,
        p50_ms=round(timings.percentile(seconds, 50) * 1000, 2),
        p99_ms=round(timings.percentile(seconds, 99) * 1000, 2),
    )
