"""`kubelend dev bench agents` and `kubelend dev bench deliver`: many agents, and the latency of instructions.

`agents` measures CPU and memory of a broker with many agents, and whether every instruction is delivered.
Every agent has its own certificate, stream and components; all run in one process, the broker in another.
While all of them advertise, a requester reserves from each in turn and releases a little later. At the end
every reservation must have become an object in the right cluster, and every release must have arrived.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubelend.agent import holds
from kubelend.apps.agent import AgentApp
from kubelend.apps.agent_environment import AgentEnvironment, OfferSettings
from kubelend.apps.agent_settings import AgentSettings
from kubelend.bench import fixtures, measure
from kubelend.bench import load as bench_load
from kubelend.bench.fixtures import FleetCertificates
from kubelend.bench.measure import UsageWindow
from kubelend.communicators import http
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.core.errors import InvalidInput, KubelendError, Unavailable, UnexpectedAnswer
from kubelend.core.lifecycle import Phase
from kubelend.envtest import processes
from kubelend.envtest.processes import AgentProcess, BrokerProcess, TemporaryDeployment
from kubelend.kits import clock, logs, tasks
from kubelend.sources import yaml_documents
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.sources.simulation import SimulatedSource
from kubelend.sources.simulation_spec import NodeGroup, SimulationSpec
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.objects import Kind, ProviderInstruction

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
                measure.show_progress(f"agents: {first:,} of {len(members):,} have joined")
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
    environment = AgentEnvironment(
        source=SimulatedSource(_TINY_CLUSTER, clock.utc_now),
        objects=RecordingObjects(member.name, deliveries, clock.utc_now),
        clock=clock.utc_now,
        namespace="",
        policy=None,
        offer=_NO_OFFER,
    )
    settings = AgentSettings(broker_url=url, auto_renew=False)
    process = AgentApp(settings, environment, member.name)
    process.communicator = communicator
    return process


async def _wait_ready(agents: Sequence[AgentApp]) -> None:
    deadline = time.perf_counter() + _READY_TIMEOUT
    while reasons := [one.health.not_ready_reason for one in agents if one.health.not_ready_reason]:
        if time.perf_counter() > deadline:
            raise Unavailable(f"{len(reasons)} agents are not ready", hint=reasons[0])
        await asyncio.sleep(_READY_POLL)


Timer = Callable[[], float]


class DeliveryTracker:
    """All reservations of a run. The provider may be notified before the requester."""

    def __init__(self, timer: Timer = time.perf_counter) -> None:
        self._timer = timer
        self._reserved: dict[str, tuple[str, float]] = {}
        """Provider, and time of the requester's response, by reservation."""
        self._released: set[str] = set()
        self._held: dict[tuple[str, str], float] = {}
        """Time of the first ProviderInstruction by reservation and provider."""
        self._withdrawn: set[tuple[str, str]] = set()

    # -- requester

    def on_reserved(self, answer: bodies.Reservation) -> None:
        self._reserved[answer.id] = answer.target_cluster_id, self._timer()

    def on_released(self, reservation: str) -> None:
        self._released.add(reservation)

    # -- provider

    def on_instruction(self, cluster: str, found: ProviderInstruction) -> None:
        key = found.spec.reservation_name, cluster
        self._held.setdefault(key, self._timer())
        if found.status.phase == holds.WITHDRAWN:
            self._withdrawn.add(key)

    # -- result

    @property
    def count(self) -> int:
        return len(self._reserved)

    @property
    def missed(self) -> int:
        """Number of holds and withdrawals that have not arrived."""
        keys = {name: (name, provider) for name, (provider, _) in self._reserved.items()}
        unheld = sum(key not in self._held for key in keys.values())
        return unheld + sum(keys.get(name) not in self._withdrawn for name in self._released)

    @property
    def latencies(self) -> list[float]:
        """Latencies from the requester's response to the provider's object."""
        return [
            max(0.0, self._held[name, provider] - answered)
            for name, (provider, answered) in self._reserved.items()
            if (name, provider) in self._held
        ]


class RecordingObjects(MemoryObjects):
    """In-memory objects of one cluster that record written ProviderInstructions."""

    def __init__(
        self, cluster: str, deliveries: DeliveryTracker, clock: Callable[[], datetime]
    ) -> None:
        super().__init__(clock)
        self._cluster = cluster
        self._deliveries = deliveries

    async def apply(self, wanted: Kind) -> Kind:
        return self._record(await super().apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        stored = await super().set_status(wanted)
        return None if stored is None else self._record(stored)

    def _record(self, stored: Kind) -> Kind:
        if isinstance(stored, ProviderInstruction):
            self._deliveries.on_instruction(self._cluster, stored)
        return stored


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
    if measure.raise_open_files() < _FILES_PER_AGENT * count + _SPARE_FILES:
        raise InvalidInput(
            f"the connections of {count} agents exceed the limit of open files (`ulimit -Hn`)"
        )
    # Only errors of the agents are of interest here.
    logs.setup("error", "console")
    with processes.temporary_deployment() as deployment:
        members = _issue_identities(deployment, count)
        with deployment.broker("--rate-limit=0") as broker:
            broker.wait_until_ready()
            client = BrokerClient(broker.url, deployment.certificate(fixtures.REQUESTER))
            load = bench_load.run_on_uvloop(
                _run_load(broker.url, members, client, broker.pid, seconds)
            )
    measure.clear_progress()
    return _agents_result(count, load)


def _issue_identities(deployment: TemporaryDeployment, count: int) -> list[AgentIdentity]:
    names = [fixtures.cluster_name(number) for number in range(count)]
    identities = FleetCertificates(deployment, names)
    for number in identities.issue():
        if number % 100 == 0:
            measure.show_progress(f"agents: {number:,} of {count:,} certificates")
    return [AgentIdentity(name, identities.directory(number)) for number, name in enumerate(names)]


async def _run_load(
    url: str, members: Sequence[AgentIdentity], client: BrokerClient, broker: int, seconds: float
) -> AgentsLoad:
    deliveries = DeliveryTracker()
    async with run_agents(url, members, deliveries), client:
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
            if due - sampled >= measure.SAMPLE_SECONDS:
                sampled = due
                window.sample()
                measure.show_progress(f"agents: {due - begin:.0f} of {seconds:.0f} s measured")
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
        measure.show_progress("agents: waiting for the last instructions")
        await asyncio.sleep(0.05)


def _agents_result(count: int, load: AgentsLoad) -> AgentsResult:
    seconds = load.deliveries.latencies
    return AgentsResult(
        count=count,
        reservations=load.deliveries.count,
        missed=load.deliveries.missed,
        cpu_percent=load.window.cpu_percent,
        rss_mb=load.window.rss_mb,
        p50_ms=round(measure.percentile(seconds, 50) * 1000, 2),
        p99_ms=round(measure.percentile(seconds, 99) * 1000, 2),
    )


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
    with (
        processes.temporary_deployment() as deployment,
        deployment.broker("--rate-limit=0") as broker,
    ):
        measure.show_progress("deliver: starting")
        broker.wait_until_ready()
        simulation = deployment.directory / f"{_PROVIDER}.yaml"
        simulation.write_text(_SIMULATION, "utf-8")
        with deployment.agent(_PROVIDER, broker, simulation) as agent:
            agent.wait_until_ready()
            seconds = _measure_latencies(deployment, broker, agent, count)
    measure.clear_progress()
    return DeliverResult(
        count,
        p50_ms=round(measure.percentile(seconds, 50) * 1000, 2),
        p99_ms=round(measure.percentile(seconds, 99) * 1000, 2),
    )


def _measure_latencies(
    deployment: TemporaryDeployment, broker: BrokerProcess, agent: AgentProcess, count: int
) -> list[float]:
    seconds = []
    with asyncio.Runner() as runner:
        requester = _Requester(runner, BrokerClient(broker.url, deployment.certificate(_REQUESTER)))
        try:
            for number in range(count):
                measure.show_progress(f"deliver: {number:,} of {count:,} instructions")
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
    name = holds.provider_instruction_name(reservation)
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
    found = yaml_documents.parse_object(path.read_bytes(), ProviderInstruction)
    if found.spec.reservation_name != reservation:
        raise KubelendError(f"{path.name} is for reservation {found.spec.reservation_name}")
