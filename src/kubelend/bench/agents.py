"""`kubelend dev bench agents`, `deliver` and `agent`: many agents, the latency of instructions, one agent.

`agents` measures CPU and memory of a broker with many agents, and whether every instruction is delivered.
Every agent has its own certificate, stream and components; all run in one process, the broker in another.
While all of them advertise, a requester reserves from each in turn and releases a little later. At the end
every reservation must have become an object in the right cluster, and every release must have arrived.

`agent` measures CPU and memory of an agent in a simulated cluster with 50 pod events per second. That it has
processed every event is verified by its metrics, with `SimulationReplay`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kubelend.agent import holds
from kubelend.agent.ports import ClusterChange, PodDeleted
from kubelend.apps.agent import AgentApp
from kubelend.apps.agent_environment import AgentEnvironment, OfferSettings
from kubelend.apps.agent_settings import AgentSettings
from kubelend.bench import fixtures, measure
from kubelend.bench.fixtures import FleetCertificates
from kubelend.bench.measure import BenchRun, Figures, UsageWindow
from kubelend.communicators import http
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.core.errors import KubelendError, Unavailable, UnexpectedResponse
from kubelend.core.lifecycle import Phase
from kubelend.core.pod_requests import Pod
from kubelend.envtest import processes, waiting
from kubelend.envtest.processes import AgentProcess, BrokerProcess
from kubelend.kits import clock, logs, tasks
from kubelend.sources import file_objects, simulation_spec
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.sources.simulation import SimulatedCluster, SimulatedSource
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


@asynccontextmanager
async def run_agents(
    run: BenchRun, url: str, certificates: Mapping[str, Path], deliveries: DeliveryTracker
) -> AsyncIterator[None]:
    """Starts an agent per cluster, waits until all are ready and stops them at exit. Raises if one fails."""
    left = iter(certificates.items())
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        running: list[asyncio.Task[str]] = []
        try:
            while batch := list(itertools.islice(left, _PARALLEL_STARTS)):
                run.progress(f"{len(running):,} of {len(certificates):,} agents have joined")
                some = [await _open_agent(url, *each, deliveries, stack) for each in batch]
                running += [group.create_task(tasks.run_all(one.root_tasks())) for one in some]
                await _wait_ready(some)
            yield
        finally:
            for task in running:
                task.cancel()


async def _open_agent(
    url: str, name: str, certificates: Path, deliveries: DeliveryTracker, stack: AsyncExitStack
) -> AgentApp:
    options = CommunicatorOptions(url=url, certificates=certificates, instance=uuid.uuid4().hex)
    communicator = await http.connect(options)
    stack.push_async_callback(communicator.close)
    environment = AgentEnvironment(
        source=SimulatedSource(_TINY_CLUSTER, clock.utc_now),
        objects=RecordingObjects(name, deliveries, clock.utc_now),
        clock=clock.utc_now,
        namespace="default",
        policy=None,
        offer=_NO_OFFER,
    )
    settings = AgentSettings(broker_url=url, auto_renew=False)
    process = AgentApp(settings, environment, name)
    process.communicator = communicator
    return process


async def _wait_ready(agents: Sequence[AgentApp]) -> None:
    deadline = time.perf_counter() + _READY_TIMEOUT * waiting.FACTOR
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
_AMOUNTS = bodies.Quantities("100m", "64Mi")


def measure_agents(count: int, seconds: float) -> Figures:
    """Measures for `seconds`, after all agents are ready."""
    measure.need_open_files(_FILES_PER_AGENT * count, f"the connections of {count} agents")
    # Only errors of the agents are of interest here.
    logs.setup("error", "console")
    deliveries = DeliveryTracker()
    with measure.run("agents") as run:
        names = [fixtures.cluster_name(number) for number in range(count)]
        identities = FleetCertificates(run, names)
        members: dict[str, Path] = {
            name: identities.directory(number) for number, name in enumerate(names)
        }
        with run.broker("--rate-limit=0") as broker:
            window = measure.run_on_uvloop(_run_load(run, broker, members, deliveries, seconds))
    return {
        "count": count,
        "reservations": deliveries.count,
        "missed": deliveries.missed,
        **window.figures(),
        # All agents share the CPU of one process.
        **measure.latency_figures(deliveries.latencies),
    }


async def _run_load(
    run: BenchRun,
    broker: BrokerProcess,
    members: Mapping[str, Path],
    deliveries: DeliveryTracker,
    seconds: float,
) -> UsageWindow:
    """Reserves from each cluster in turn; waits until all instructions were delivered, or the timeout."""
    requester = BrokerClient(broker.url, run.deployment.certificate(fixtures.REQUESTER))
    count = round(max(MIN_RATE, len(members) / seconds) * seconds)
    providers = list(members)
    async with run_agents(run, broker.url, members, deliveries), requester as client:

        async def reserve(number: int) -> None:
            await _reserve_and_release(client, providers[number % len(providers)], deliveries)

        window = await run.send_evenly(broker.pid, reserve, count, seconds)
        deadline = time.perf_counter() + _DELIVERY_GRACE * waiting.FACTOR
        while deliveries.missed and time.perf_counter() < deadline:
            run.progress("waiting for the last instructions")
            await asyncio.sleep(0.05)
    return window


async def _reserve_and_release(
    client: BrokerClient, provider: str, deliveries: DeliveryTracker
) -> None:
    request = bodies.ReservationRequest(_AMOUNTS, target_cluster_id=provider)
    answer = await client.reserve(request)
    if answer.status.phase != Phase.RESERVED:
        raise UnexpectedResponse(f"reservation from {provider} failed: {answer.status.message}")
    deliveries.on_reserved(answer)
    await asyncio.sleep(_HOLD_SECONDS)
    await client.release(answer.id)
    deliveries.on_released(answer.id)


DELIVERY_TIMEOUT = 10.0
"""Timeout of an instruction in seconds."""

_PROVIDER, _REQUESTER = "provider", "requester"
_SIMULATION = "nodes: [{capacity: {cpu: 64, memory: 256Gi}}]\n"
_REQUEST = bodies.ReservationRequest(bodies.Quantities("100m", "64Mi"))
_FILE_POLL = 0.0005


def measure_deliver(count: int) -> Figures:
    """Reserves and releases `count` times sequentially."""
    with (
        measure.run("deliver") as run,
        run.broker("--rate-limit=0") as broker,
        run.deployment.simulated_agent(_PROVIDER, broker, _SIMULATION) as agent,
    ):
        agent.wait_until_ready()
        client = BrokerClient(broker.url, run.deployment.certificate(_REQUESTER))
        # The loop runs only during calls: polling the disk in it would be less precise.
        with asyncio.Runner() as runner:
            runner.run(client.__aenter__())
            seconds = []
            for number in range(count):
                run.progress(f"{number:,} of {count:,} instructions")
                seconds.append(_measure_delivery(runner, client, agent))
            runner.run(client.__aexit__(None, None, None))
    return {"count": count, **measure.latency_figures(seconds)}


def _measure_delivery(runner: asyncio.Runner, client: BrokerClient, agent: AgentProcess) -> float:
    """Returns the seconds from the broker's response until the provider has the instruction."""

    async def reserve() -> tuple[str, float]:
        answer = await client.reserve(_REQUEST)
        return answer.id, time.perf_counter()

    reservation, answered = runner.run(reserve())
    key = f"default/{holds.provider_instruction_name(reservation)}"
    path = file_objects.object_path(agent.objects, ProviderInstruction, key)
    seconds = _wait_for_file(path, agent) - answered
    found = file_objects.parse_object(path.read_bytes(), ProviderInstruction)
    if found.spec.reservation_name != reservation:
        raise KubelendError(f"{path.name} is for reservation {found.spec.reservation_name}")
    runner.run(client.release(reservation))
    return seconds


def _wait_for_file(path: Path, agent: AgentProcess) -> float:
    """Returns when the file appeared. It is complete then, because the agent renames it into place."""
    limit = DELIVERY_TIMEOUT * waiting.FACTOR
    deadline = time.perf_counter() + limit
    while not path.exists():
        if time.perf_counter() > deadline or not agent.is_running:
            raise Unavailable(
                f"no instruction came within {limit:g} s: {path.name}", hint=agent.log_tail()
            )
        time.sleep(_FILE_POLL)
    return time.perf_counter()


EVENTS_PER_S = 50

_WARM_UP_SECONDS = 10.0
"""Maximum seconds of warm-up before the window."""
_ALLOCATED_METRIC = "kubelend_agent_allocated"
_METRICS_TIMEOUT = 10.0


def measure_agent(pods: int, nodes: int, seconds: float) -> Figures:
    """Measures the agent of such a cluster for `seconds`, after it is ready and warmed up."""
    described = simulation_spec.steady_simulation_spec(nodes, pods, EVENTS_PER_S)
    # JSON is valid YAML.
    text, metrics = msgspec.json.encode(described).decode(), "--metrics-bind-address=127.0.0.1:0"
    with (
        measure.run("agent") as run,
        run.broker() as broker,
        run.deployment.simulated_agent("steady", broker, text, metrics) as agent,
    ):
        agent.wait_until_ready()
        time.sleep(min(_WARM_UP_SECONDS, seconds))
        before = _AllocationSample(agent)
        window = run.watch(agent, seconds)
        after = _AllocationSample(agent)
    return {
        "pods": pods,
        "nodes": nodes,
        "events_per_s": round(after.events_since(before, described), 1),
        **window.figures(),
    }


class _AllocationSample:
    """The allocated memory that the agent reports at a moment."""

    def __init__(self, agent: AgentProcess) -> None:
        self.at = time.perf_counter()
        self.age = self.at - agent.started_at
        self.memory = allocated_memory(agent)

    def events_since(self, earlier: _AllocationSample, described: SimulationSpec) -> float:
        """Returns the events processed per second, found by replaying the simulation."""
        replay, most = SimulationReplay(described), 2 * EVENTS_PER_S
        replay.events_until(earlier.memory, int(most * (earlier.age + _METRICS_TIMEOUT)))
        seconds = self.at - earlier.at
        return replay.events_until(self.memory, int(most * (seconds + _METRICS_TIMEOUT))) / seconds


def allocated_memory(agent: AgentProcess) -> int:
    """Returns the bytes that the pods of its cluster request, from its metrics."""
    port = agent.port_of("metrics")
    scraped = processes.call_http(port, "/metrics", timeout=_METRICS_TIMEOUT)
    for family in text_string_to_metric_families(scraped.body.decode()):
        for sample in family.samples:
            if sample.name == _ALLOCATED_METRIC and sample.labels == {"resource": "memory"}:
                return int(sample.value)
    raise UnexpectedResponse(f"the agent's metrics do not contain {_ALLOCATED_METRIC} for memory")


class SimulationReplay:
    """A simulated cluster that has been replayed up to some event."""

    def __init__(self, description: SimulationSpec) -> None:
        self._simulation = SimulatedCluster(description)
        self._memory_by_pod: dict[str, int] = {}
        """Memory by pod, for pods on a node."""
        self._memory = 0
        self._apply_changes(self._simulation.snapshot().pods)

    def events_until(self, memory: int, most: int) -> int:
        """Replays until `memory` is allocated; returns the number of pod events.

        Raises if that state is not reached within `most` events.
        """
        events = 0
        while self._memory != memory:
            if events >= most or self._simulation.next_at is None:
                raise KubelendError(
                    f"the agent reports {memory} allocated bytes, which the simulation never reached"
                )
            events += self._apply_changes(self._simulation.step().changes)
        return events

    def _apply_changes(self, changes: Iterable[ClusterChange]) -> int:
        pods = [change for change in changes if isinstance(change, Pod | PodDeleted)]
        for pod in pods:
            self._memory -= self._memory_by_pod.pop(pod.id, 0)
            if isinstance(pod, Pod) and pod.node:
                self._memory_by_pod[pod.id] = pod.requests.memory
                self._memory += pod.requests.memory
        return len(pods)
