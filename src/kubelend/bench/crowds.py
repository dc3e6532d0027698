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

from kubelend.apps.agent import Process
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.surroundings import Offer, Surroundings
from kubelend.bench import progress
from kubelend.bench.deliveries import Deliveries, NotedObjects
from kubelend.communicators import http
from kubelend.communicators.options import Options
from kubelend.core.errors import Unavailable
from kubelend.kits import clock, tasks
from kubelend.sources.descriptions import Description, NodeGroup
from kubelend.sources.simulated import SimulatedSource

_TINY = Description([NodeGroup({"cpu": 16, "memory": "64Gi"})])
_OFFER = Offer(cost=None, labels={}, region="", policy=None)
_RAMP = 32
"""Number of agents started in parallel."""
_READY_WITHIN = 30.0
_LOOK_EVERY = 0.01


class Member(NamedTuple):
    """The cluster of one agent."""

    name: str
    certificates: Path


@asynccontextmanager
async def joined(
    url: str, members: Sequence[Member], deliveries: Deliveries
) -> AsyncIterator[None]:
    """Starts all agents, waits until they are ready and stops them at exit. Raises if one of them fails."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        running: list[asyncio.Task[str]] = []
        try:
            for first in range(0, len(members), _RAMP):
                progress.say(f"agents: {first:,} of {len(members):,} have joined")
                some = [
                    await _agent(url, member, deliveries, stack)
                    for member in members[first : first + _RAMP]
                ]
                running += [group.create_task(tasks.run_all(one.roots())) for one in some]
                await _until_ready(some)
            yield
        finally:
            for task in running:
                task.cancel()


async def _agent(
    url: str, member: Member, deliveries: Deliveries, stack: AsyncExitStack
) -> Process:
    options = Options(url=url, certificates=member.certificates, instance=uuid.uuid4().hex)
    communicator = await http.connect(options)
    stack.push_async_callback(communicator.close)
    around = Surroundings(
        source=SimulatedSource(_TINY, clock.utc_now),
        objects=NotedObjects(member.name, deliveries, clock.utc_now),
        clock=clock.utc_now,
        namespace="",
        policy=None,
        offer=_OFFER,
    )
    settings = AgentSettings(broker_url=url, auto_renew=False)
    process = Process(settings, around, member.name)
    process.communicator = communicator
    return process


async def _until_ready(agents: Sequence[Process]) -> None:
    deadline = time.perf_counter() + _READY_WITHIN
    while reasons := [one.standing.unready for one in agents if one.standing.unready]:
        if time.perf_counter() > deadline:
            raise Unavailable(f"{len(reasons)} agents are not ready", hint=reasons[0])
        await asyncio.sleep(_LOOK_EVERY)
