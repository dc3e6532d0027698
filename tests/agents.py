"""Agents as they are shipped, in this process: over real sockets, with objects that outlive them.

    async with agents.scene(certificates, tmp_path) as (broker, start, _):
        rome, bonn = await start("rome", broker.port), await start("bonn", broker.port)
        await rome.create_request("w", cpu="2")
        await rome.becomes("w", "Active")
        await agents.until_agreed(broker, rome, bonn)

Only the way to the broker is put together here (`kubelend.communicators.http`), so that a test can wrap it
and shorten its patience, and the peering connects at once; everything else is `kubelend.apps.agent`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import brokers
from callers import Json
from certificates import Certificates
from clocks import RunningClock
from kubelend.agent import holds as agent_holds
from kubelend.agent.conditions import FINISHED
from kubelend.agent.ports import BrokerCommunicator, LocalObjects
from kubelend.apps import agent as app
from kubelend.apps import agent_environment
from kubelend.apps.agent_environment import AgentEnvironment
from kubelend.apps.agent_peering import AgentPeering
from kubelend.apps.agent_settings import AgentSettings
from kubelend.broker import agent_sessions
from kubelend.communicators import http
from kubelend.communicators.factory import IDLE_TIMEOUT, CommunicatorOptions
from kubelend.kits import clock, tasks
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.stores import factory
from kubelend.wire.objects import (
    Metadata,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
)
from peers import FakePeering
from waiting import PATIENCE, until_resolved

SOME = "nodes: [{capacity: {cpu: 64, memory: 256Gi}}]\n"
"""A cluster with room for whatever a test asks for."""

NOTHING = "nodes: [{capacity: {cpu: 1m, memory: 1Mi}}]\n"
"""One that can only borrow."""

HOUR = timedelta(hours=1)

QUICK: dict[str, Any] = {
    "advertisement_requeue_interval": timedelta(seconds=1),
    "advertisement_validity": timedelta(minutes=5),
    "advertisement_damping": timedelta(milliseconds=50),
    "instruction_poll_interval": timedelta(milliseconds=500),
    "broker_timeout": timedelta(seconds=5),
    "auto_renew": False,
}

LEFT_SOCKETS = "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
"""Of connections that break while they are made. On this loop, which is not the agent's own, the HTTP
library now and then leaves their sockets to the garbage collector."""

OPEN = ("Pending", "Reserved", "Active")

Wrap = Callable[[BrokerCommunicator], BrokerCommunicator]


class Cluster:
    """The objects of one, as its users make and see them."""

    def __init__(self, name: str, objects: LocalObjects) -> None:
        self.name = name
        self.objects = objects

    async def create_request(
        self, name: str, cpu: str = "1", memory: str = "1Gi", **spec: Any
    ) -> None:
        """Ask for something by a ResourceRequest."""
        wanted = ResourceRequestSpec(requested_cpu=cpu, requested_memory=memory, **spec)
        await self.objects.apply(ResourceRequest(Metadata(name), wanted))

    async def delete_request(self, name: str) -> None:
        await self.objects.delete(ResourceRequest, f"default/{name}")

    async def delete_all_requests(self) -> None:
        for found in await self.objects.list(ResourceRequest):
            await self.objects.delete(ResourceRequest, found.key)

    async def request(self, name: str) -> ResourceRequest | None:
        return await self.objects.find(ResourceRequest, f"default/{name}")

    async def becomes(self, name: str, *phases: str, patience: float = PATIENCE) -> ResourceRequest:
        """Wait for a request to get so far."""
        return await self.shows(name, lambda found: found.status.phase in phases, patience)

    async def shows(
        self, name: str, wanted: Callable[[ResourceRequest], bool], patience: float = PATIENCE
    ) -> ResourceRequest:
        """Wait for a request to be as wanted."""
        found: ResourceRequest | None = None

        async def look() -> str:
            nonlocal found
            found = await self.request(name)
            is_so = found is not None and wanted(found)
            return "" if is_so else f"{self.name}: {name} is {found}"

        await until_resolved(look, patience)
        assert found is not None
        return found

    async def wait_deleted(self, name: str, patience: float = PATIENCE) -> None:
        """Wait for a request to be gone."""

        async def look() -> str:
            found = await self.request(name)
            return "" if found is None else f"{self.name}: {name} is still there: {found}"

        await until_resolved(look, patience)

    async def uses(self) -> dict[str, str]:
        """The reservations that live by its ReservationInstructions, each with its provider."""
        return {
            one.spec.reservation_name: one.spec.target_cluster_id
            for one in await self.objects.list(ReservationInstruction)
            if one.status.phase != FINISHED
        }

    async def holds(self) -> dict[str, str]:
        """Those that live by its ProviderInstructions, each with its requester."""
        return {
            one.spec.reservation_name: one.spec.requester_cluster_id
            for one in await self.objects.list(ProviderInstruction)
            if not agent_holds.is_instruction_finished(one)
        }


class Agent(Cluster):
    """One cluster's. It can be killed and started again: only the objects stay."""

    def __init__(
        self, name: str, settings: AgentSettings, silence: timedelta = IDLE_TIMEOUT
    ) -> None:
        self.settings = settings
        self._silence = silence
        self._around = agent_environment.simulated_environment(settings)
        super().__init__(name, self._around.objects)
        self.wrap: Wrap = lambda inner: inner
        """Put around the way to the broker at the next start."""
        self.wrap_objects: Callable[[LocalObjects], LocalObjects] = lambda objects: objects
        """The same for the objects."""
        self.process = self._new_process(self._around)
        self._connections = AsyncExitStack()
        self._roots: asyncio.Task[str] | None = None

    def _new_process(self, environment: AgentEnvironment) -> app.AgentApp:
        process = app.AgentApp(self.settings, environment, self.name)
        process.peering = AgentPeering(FakePeering())
        return process

    def skew_clock(self, skew: timedelta) -> None:
        """Before its start: its clock is ahead by so much, or behind if it is negative."""

        def now() -> datetime:
            return clock.utc_now() + skew

        self.objects = MemoryObjects(now)
        self._around = self._around._replace(clock=now, objects=self.objects)

    async def start(self) -> None:
        options = CommunicatorOptions(
            url=self.settings.broker_url,
            certificates=Path(self.settings.broker_cert_path),
            timeout=self.settings.broker_timeout,
            idle_timeout=self._silence,
            instance=uuid.uuid4().hex,
        )
        communicator = await http.connect(options)
        self._connections.push_async_callback(communicator.close)
        around = self._around._replace(objects=self.wrap_objects(self.objects))
        self.process = self._new_process(around)
        self.process.communicator = self.wrap(communicator)
        self._roots = asyncio.create_task(tasks.run_all(self.process.root_tasks()), name=self.name)

    async def kill(self) -> None:
        """End it wherever it is; it must not have ended by itself. Killing again does nothing."""
        roots, self._roots = self._roots, None
        try:
            if roots is not None and roots.done():
                await roots
            if roots is not None:
                roots.cancel()
                await asyncio.wait([roots])
        finally:
            await self._connections.aclose()

    async def ends(self) -> None:
        """Wait for it to end by itself; raises what it ends by."""
        roots, self._roots = self._roots, None
        assert roots is not None
        async with asyncio.timeout(PATIENCE):
            await roots

    @property
    def problems(self) -> dict[str, str]:
        """What keeps its parts from their work."""
        return self.process.health.errors

    async def wait_until_ready(self) -> None:
        async def look() -> str:
            return self.process.health.not_ready_reason

        await until_resolved(look)


Start = Callable[..., Awaitable[Agent]]
"""Starts an agent at a broker's port, and waits until it is ready; see `starting`."""


class Scene(NamedTuple):
    """A broker in this process, on a store in the test's directory, with a clock that goes."""

    broker: brokers.Running
    start: Start
    directory: Path


@asynccontextmanager
async def scene(
    certificates: Certificates, directory: Path, *, grace: timedelta = timedelta(), **settings: Any
) -> AsyncIterator[Scene]:
    """A broker and as many agents as are started. When all are gone, its books are audited.

    `grace` is how long it keeps the place of an agent that has ended.
    """
    store = directory / "kubelend.db"
    running = brokers.running(
        certificates,
        open_store=partial(factory.open_store, str(store)),
        clock=RunningClock(),
        **settings,
    )
    with mock.patch.object(agent_sessions, "RECONNECT_GRACE", grace):
        async with running as broker, starting(certificates, directory) as start:
            yield Scene(broker, start, directory)
    brokers.audited(store)


@asynccontextmanager
async def starting(certificates: Certificates, directory: Path) -> AsyncIterator[Start]:
    """Starts agents, which are all killed at the end; none may have ended by itself.

    `prepare` is called before, and `settings` are AgentSettings beside the `QUICK` ones.
    """
    async with AsyncExitStack() as stack:

        async def start(
            name: str,
            port: int,
            *,
            cluster: str = SOME,
            silence: timedelta = IDLE_TIMEOUT,
            prepare: Callable[[Agent], None] = lambda _: None,
            **settings: Any,
        ) -> Agent:
            made = made_for(name, port, certificates, directory, cluster, **settings)
            agent = Agent(name, made, silence)
            stack.push_async_callback(agent.kill)
            prepare(agent)
            await agent.start()
            await agent.wait_until_ready()
            return agent

        yield start


def made_for(
    name: str, port: int, certificates: Certificates, directory: Path, cluster: str, **settings: Any
) -> AgentSettings:
    """The settings of an agent of a simulated cluster."""
    simulation = directory / f"{name}.yaml"
    simulation.write_text(cluster)
    values = QUICK | settings
    return AgentSettings(
        broker_url=f"https://localhost:{port}",
        broker_cert_path=str(certificates.cluster(name)),
        source="simulated",
        simulation=str(simulation),
        **values,
    )


# -- what has to hold in the end


async def until_agreed(
    broker: brokers.Callers, *members: Cluster, patience: float = PATIENCE
) -> dict[str, Json]:
    """Wait until broker and objects say the same; gives the reservations that are open, by their IDs."""
    known: dict[str, Json] = {}

    async def look() -> str:
        nonlocal known
        known = await open_reservations(broker)
        found = [await _disagreements(agent, known) for agent in members]
        return "; ".join(problem for problems in found for problem in problems)

    await until_resolved(look, patience)
    return known


async def until_over(
    broker: brokers.Callers, *members: Cluster, patience: float = PATIENCE
) -> None:
    """Delete all requests, and wait until nothing lives any more, at either side or at the broker."""
    for agent in members:
        await agent.delete_all_requests()

    async def look() -> str:
        left = [one for agent in members for one in await agent.objects.list(ResourceRequest)]
        return f"still there: {left}" if left else ""

    await until_resolved(look, patience)
    assert await until_agreed(broker, *members, patience=patience) == {}


async def open_reservations(broker: brokers.Callers) -> dict[str, Json]:
    page = await broker.viewer().read("reservations", limit="1000", phase=",".join(OPEN))
    assert "next" not in page
    return {found["id"]: found for found in page["reservations"]}


async def _disagreements(agent: Cluster, known: dict[str, Json]) -> list[str]:
    borrowed, lent = {}, {}
    for name, found in known.items():
        if found["requesterID"] == agent.name and found["status"]["phase"] != "Pending":
            borrowed[name] = found["targetClusterID"]
        if found.get("targetClusterID") == agent.name:
            lent[name] = found["requesterID"]
    uses, holds = await agent.uses(), await agent.holds()
    requests = await agent.objects.list(ResourceRequest)
    return [
        *([f"{agent.name} uses {uses}, but has {borrowed}"] if uses != borrowed else []),
        *([f"{agent.name} holds {holds}, but lends {lent}"] if holds != lent else []),
        *_unmet(agent.name, requests, known),
    ]


def _unmet(name: str, requests: list[ResourceRequest], known: dict[str, Json]) -> Iterator[str]:
    """One lock for each request that is open, and each lock for a request."""
    waiting = [found for found in requests if found.status.phase in ("", *OPEN)]
    bound = Counter(found.status.reservation_name for found in waiting)
    own = Counter(found["id"] for found in known.values() if found["requesterID"] == name)
    if bound != own:
        yield f"{name} has requests for {bound}, and the broker {own}"
    for found in waiting:
        body = known.get(found.status.reservation_name)
        if body is not None and body["status"]["phase"] != found.status.phase:
            yield f"{found.key} is {found.status.phase}, but {body['status']['phase']}"
