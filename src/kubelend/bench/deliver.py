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
from kubelend.apps.trials import Trial
from kubelend.bench import progress, timings
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.sources import documents
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction

PATIENCE = 10.0
"""Timeout of an instruction in seconds."""

_PROVIDER, _REQUESTER = "provider", "requester"
_SOME = "nodes: [{capacity: {cpu: 64, memory: 256Gi}}]\n"
_WISH = bodies.ReservationRequest(bodies.Quantities("100m", "64Mi"))
_LOOK_EVERY = 0.0005


class Result(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    count: int
    p50_ms: float
    p99_ms: float


def measure(count: int) -> Result:
    """Reserves and releases `count` times sequentially."""
    with trials.trial() as trial, trial.broker("--rate-limit=0") as broker:
        progress.say("deliver: starting")
        broker.wait_until_ready()
        simulation = trial.directory / f"{_PROVIDER}.yaml"
        simulation.write_text(_SOME, "utf-8")
        with trial.agent(_PROVIDER, broker, simulation) as agent:
            agent.wait_until_ready()
            seconds = _deliveries(trial, broker, agent, count)
    progress.done()
    return Result(
        count,
        p50_ms=round(timings.percentile(seconds, 50) * 1000, 2),
        p99_ms=round(timings.percentile(seconds, 99) * 1000, 2),
    )


def _deliveries(
    trial: Trial, broker: BrokerProcess, agent: AgentProcess, count: int
) -> list[float]:
    seconds = []
    with asyncio.Runner() as runner:
        requester = _Requester(runner, BrokerClient(broker.url, trial.certificate(_REQUESTER)))
        try:
            for number in range(count):
                progress.say(f"deliver: {number:,} of {count:,} instructions")
                made = requester.reserve()
                path = _path(agent.objects, made.reservation)
                seconds.append(_there_at(path, agent) - made.at)
                _check(path, made.reservation)
                requester.release(made.reservation)
        finally:
            requester.close()
    return seconds


class _Made(NamedTuple):
    reservation: str
    at: float
    """When the broker's response had been read."""


class _Requester:
    """Runs its event loop only during calls: polling the disk in the loop would be less precise."""

    def __init__(self, runner: asyncio.Runner, client: BrokerClient) -> None:
        self._run = runner.run
        self._client = client
        self._run(client.__aenter__())

    def reserve(self) -> _Made:
        return self._run(self._reserve())

    def release(self, reservation: str) -> None:
        self._run(self._client.release(reservation))

    def close(self) -> None:
        self._run(self._client.__aexit__(None, None, None))

    async def _reserve(self) -> _Made:
        answer = await self._client.reserve(_WISH)
        return _Made(answer.id, time.perf_counter())


def _path(objects: Path, reservation: str) -> Path:
    name = provisions.name_of(reservation)
    return objects / ProviderInstruction.plural / f"default.{name}.yaml"


def _there_at(path: Path, agent: AgentProcess) -> float:
    """Returns when the file appeared. It is complete then, because the agent renames it into place."""
    deadline = time.perf_counter() + PATIENCE
    while not path.exists():
        if time.perf_counter() > deadline or not agent.is_running:
            raise Unavailable(
                f"no instruction came within {PATIENCE:g} s: {path.name}", hint=agent.last_words()
            )
        time.sleep(_LOOK_EVERY)
    return time.perf_counter()


def _check(path: Path, reservation: str) -> None:
    found = documents.parse(path.read_bytes(), ProviderInstruction)
    if found.spec.reservation_name != reservation:
        raise KubelendError(f"{path.name} is for reservation {found.spec.reservation_name}")
