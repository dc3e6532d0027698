"""Runs many agents in one process, each with its own certificate, connections, stream and components.

A process per agent would not fit on one machine. Their clusters are tiny and their objects are in memory, so
that mainly the communication with the broker remains.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from kubelend.apps.agent import AgentApp
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.surroundings import AgentEnvironment, OfferSettings
from kubelend.bench import progress
from kubelend.bench.deliveries import DeliveryTracker, RecordingObjects
from kubelend.communicators import http
from kubelend.communicators.options import CommunicatorOptions
from kubelend.core.errors import Unavailable
from kubelend.kits import clock, tasks
from kubelend.sources.descriptions import NodeGroup, SimulationSpec
from kubelend.sources.simulated import SimulatedSource

_TINY_CLUSTER = SimulationSpec([NodeGroup({"cpu": 16, "memory": "64Gi"})])
_NO_OFFER = OfferSettings(cost=None, labels={}, region="", policy=None)
_PARALLEL_STARTS = 32
"""Number of agents started in parallel."""
_READY_TIMEOUT = 30.0
_READY_POLL = 0.01


class AgentIdentity(NamedTuple):
    """The cluster of one agent."""

    name: str
    certificates: Path


@asynccontextmanager
async def run_agents(
    url: str, members: Sequence[AgentIdentity], deliveries: DeliveryTracker
) -> AsyncIterator[None]:
    """Starts all agents, waits until they are ready and stops them at exit. Raises if one of them fails."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        running: list[asyncio.Task[str]] = []
        try:
            for first in range(0, len(members), _PARALLEL_STARTS):
                progress.show_progress(f"agents: {first:,} of {len(members):,} have joined")
                some = [
                    await _open_agent(url, member, deliveries, stack)
                    for member in members[first : first + _PARALLEL_STARTS]
                ]
                running += [group.create_task(tasks.run_all(one.root_tasks())) for one in some]
                await _wait_ready(some)
            yield
        finally:
            for task in running:
                task.cancel()


async def _open_agent(
    url: str, member: AgentIdentity, deliveries: DeliveryTracker, stack: AsyncExitStack
) -> AgentApp:
    options = CommunicatorOptions(
        url=url, certificates=member.certificates, instance=uuid.uuid4().hex
    )
    communicator = await http.connect(options)
    stack.push_async_callback(communicator.close)
    around = AgentEnvironment(
        source=SimulatedSource(_TINY_CLUSTER, clock.utc_now),
        objects=RecordingObjects(member.name, deliveries, clock.utc_now),
        clock=clock.utc_now,
        namespace="",
        policy=None,
        offer=_NO_OFFER,
    )
    settings = AgentSettings(broker_url=url, auto_renew=False)
    process = AgentApp(settings, around, member.name)
    process.communicator = communicator
    return process


async def _wait_ready(agents: Sequence[AgentApp]) -> None:
    deadline = time.perf_counter() + _READY_TIMEOUT
    while reasons := [one.health.not_ready_reason for one in agents if one.health.not_ready_reason]:
        if time.perf_counter() > deadline:
            raise Unavailable(f"{len(reasons)} agents are not ready", hint=reasons[0])
        await asyncio.sleep(_READY_POLL)
