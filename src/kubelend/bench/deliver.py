"""`kubelend dev bench deliver`: latency from the broker's response to the provider's ProviderInstruction.

A requester reserves repeatedly from the cluster of a real agent. The latency covers the broker's stream, the
agent's own decision and a durable write to disk.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubelend.agent import provisions
from kubelend.apps import trials
from kubelend.apps.children import AgentProcess, BrokerProcess
from kubelend.apps.trials import TemporaryDeployment
from kubelend.bench import progress, timings
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.sources import documents
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction

DELIVERY_TIMEOUT = 10.0
"""Timeout of an instruction in seconds."""

_PROVIDER, _REQUESTER = "provider", "requester"
_SIMULATION = "nodes: [{capacity: {cpu: 64, memory: 256Gi}}]\n"
_REQUEST = bodies.ReservationRequest(bodies.Quantities("100m", "64Mi"))
_FILE_POLL = 0.0005


class DeliverResult(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    count: int
    p50_ms: float
    p99_ms: float


def measure_deliver(count: int) -> DeliverResult:
    """Reserves and releases `count` times sequentially."""
    with trials.temporary_deployment() as trial, trial.broker("--rate-limit=0") as broker:
        progress.show_progress("deliver: starting")
        broker.wait_until_ready()
        simulation = trial.directory / f"{_PROVIDER}.yaml"
        simulation.write_text(_SIMULATION, "utf-8")
        with trial.agent(_PROVIDER, broker, simulation) as agent:
            agent.wait_until_ready()
            seconds = _measure_latencies(trial, broker, agent, count)
    progress.clear_progress()
    return DeliverResult(
        count,
        p50_ms=round(timings.percentile(seconds, 50) * 1000, 2),
        p99_ms=round(timings.percentile(seconds, 99) * 1000, 2),
    )


def _measure_latencies(
    trial: TemporaryDeployment, broker: BrokerProcess, agent: AgentProcess, count: int
) -> list[float]:
    seconds = []
    with asyncio.Runner() as runner:
        requester = _Requester(runner, BrokerClient(broker.url, trial.certificate(_REQUESTER)))
        try:
            for number in range(count):
                progress.show_progress(f"deliver: {number:,} of {count:,} instructions")
                made = requester.reserve()
                path = _instruction_path(agent.objects, made.reservation)
                seconds.append(_wait_for_file(path, agent) - made.at)
                _check_instruction(path, made.reservation)
                requester.release(made.reservation)
        finally:
            requester.close()
    return seconds


class _Confirmed(NamedTuple):
    reservation: str
    at: float
    """When the broker's response had been read."""


class _Requester:
    """Runs its event loop only during calls: polling the disk in the loop would be less precise."""

    def __init__(self, runner: asyncio.Runner, client: BrokerClient) -> None:
        self._run = runner.run
        self._client = client
        self._run(client.__aenter__())

    def reserve(self) -> _Confirmed:
        return self._run(self._reserve())

    def release(self, reservation: str) -> None:
        self._run(self._client.release(reservation))

    def close(self) -> None:
        self._run(self._client.__aexit__(None, None, None))

    async def _reserve(self) -> _Confirmed:
        answer = await self._client.reserve(_REQUEST)
        return _Confirmed(answer.id, time.perf_counter())


def _instruction_path(objects: Path, reservation: str) -> Path:
    name = provisions.provider_instruction_name(reservation)
    return objects / ProviderInstruction.plural / f"default.{name}.yaml"


def _wait_for_file(path: Path, agent: AgentProcess) -> float:
    """Returns when the file appeared. It is complete then, because the agent renames it into place."""
    deadline = time.perf_counter() + DELIVERY_TIMEOUT
    while not path.exists():
        if time.perf_counter() > deadline or not agent.is_running:
            raise Unavailable(
                f"no instruction came within {DELIVERY_TIMEOUT:g} s: {path.name}",
                hint=agent.log_tail(),
            )
        time.sleep(_FILE_POLL)
    return time.perf_counter()


def _check_instruction(path: Path, reservation: str) -> None:
    found = documents.parse_object(path.read_bytes(), ProviderInstruction)
    if found.spec.reservation_name != reservation:
        raise KubelendError(f"{path.name} is for reservation {found.spec.reservation_name}")
