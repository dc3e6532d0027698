"""Clusters, context and steps of the demo. Each step acts, checks its effect and returns lines to print."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from kubelend.core.errors import KubelendError
from kubelend.core.lifecycle import Role
from kubelend.demo import screen
from kubelend.envtest.processes import AgentProcess, BrokerProcess, TemporaryDeployment
from kubelend.kits import clock, tables
from kubelend.sources.file_objects import FileObjects
from kubelend.stores import audit
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.objects import Kind, ProviderInstruction, ReservationInstruction, ResourceRequest

REQUEST_NAME, OVERSIZED_NAME = "training", "too-much"
FAILED, WITHDRAWN = "Failed", "Withdrawn"


async def wait_for_agents(context: DemoContext) -> list[str]:
    for agent in context.agents.values():
        await asyncio.to_thread(agent.wait_until_ready)
    async with context.client(ADMIN_NAME) as admin:
        known = await admin.all_clusters()
    active = sorted(one.advertisement.cluster_id for one in known if one.status.active)
    expect(active == sorted(context.agents), f"only {', '.join(active)} are active")
    for name in context.agents:
        context.available_before[name] = await context.available(name)
    headers = ("CLUSTER", "REGION", "CPU FREE", "MEMORY FREE", "GPU FREE", "EUR/CORE-HOUR")
    return tables.align_columns(headers, map(_offer_row, known), right=(2, 3, 4, 5))


async def dry_run(context: DemoContext) -> list[str]:
    async with context.client(BERLIN) as client:
        found = await client.explain(RESERVATION_REQUEST)
    expect(found.fitting == 2, f"expected two clusters to fit, but {found.summary}")
    headers = ("CLUSTER", "FITS", "SCORE", "PRICE PER HOUR", "REASON")
    rows = [_candidate_row(one) for one in found.candidates]
    requested = f"{_amounts_text(RESERVATION_REQUEST.requested_resources)}: {found.summary}"
    return [*screen.wrap_text(requested), *tables.align_columns(headers, rows, right=(2, 3))]


async def create_request(context: DemoContext) -> list[str]:
    path = context.path(BERLIN, ResourceRequest, REQUEST_NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(REQUEST_MANIFEST, "utf-8")
    context.requested_at = time.time()
    found = await context.wait_for(
        BERLIN, ResourceRequest, REQUEST_NAME, lambda one: bool(one.status.reservation_name)
    )
    context.reservation, context.provider = (
        found.status.reservation_name,
        found.status.target_cluster_id,
    )
    expect(context.provider == PARIS, f"expected provider {PARIS}, but got {context.provider}")
    lines = [f"spec in {path.name}:", *(f"  {line}" for line in REQUEST_SPEC.splitlines())]
    return [*lines, f"{context.reservation} is reserved in {context.provider}"]


async def check_reserved(context: DemoContext) -> list[str]:
    before, now = (
        context.available_before[context.provider],
        await context.available(context.provider),
    )
    expect(before != now, f"{context.provider} still has {_amounts_text(now)} available")
    return [
        f"available in {context.provider} before: {_amounts_text(before)}",
        f"available in {context.provider} now:    {_amounts_text(now)}",
    ]


async def check_instructions(context: DemoContext) -> list[str]:
    use = await context.wait_for(
        BERLIN, ReservationInstruction, context.reservation, lambda one: one.status.delivered
    )
    hold = await _wait_held(context)
    headers = ("CLUSTER", "INSTRUCTION", "AFTER")
    rows = [
        (BERLIN, use.spec.message, _since_request(context, use.metadata.creation_timestamp)),
        (
            context.provider,
            hold.spec.message,
            _since_request(context, hold.metadata.creation_timestamp),
        ),
    ]
    return tables.align_columns(headers, rows, right=(2,))


async def wait_active(context: DemoContext) -> list[str]:
    found = await context.wait_for(
        BERLIN, ResourceRequest, REQUEST_NAME, lambda one: one.status.phase == "Active"
    )
    seconds = _since_request(context, found.status.last_update_time)
    return [f"{found.status.reservation_name} is Active, {seconds} after the request"]


async def kill_provider(context: DemoContext) -> list[str]:
    lost, killed_at = context.provider, time.time()
    await asyncio.to_thread(context.agents[lost].kill)
    found = await context.wait_for(
        BERLIN,
        ResourceRequest,
        REQUEST_NAME,
        lambda one: one.status.target_cluster_id not in {"", lost},
    )
    context.provider = found.status.target_cluster_id
    seconds = screen.format_seconds(time.time() - killed_at)
    return [
        *screen.wrap_text(
            f"{context.reservation} failed over from {lost} to {context.provider} after {seconds}"
        ),
        *screen.wrap_text(f"{BERLIN}: {found.status.message}"),
    ]


async def check_new_provider(context: DemoContext) -> list[str]:
    hold = await _wait_held(context)
    use = await context.wait_for(
        BERLIN,
        ReservationInstruction,
        context.reservation,
        lambda one: one.spec.target_cluster_id == context.provider,
    )
    return [f"{context.provider}: {hold.spec.message}", f"{BERLIN}: {use.spec.message}"]


async def reject_oversized_request(context: DemoContext) -> list[str]:
    path = context.path(BERLIN, ResourceRequest, OVERSIZED_NAME)
    path.write_text(OVERSIZED_MANIFEST, "utf-8")
    found = await context.wait_for(
        BERLIN, ResourceRequest, OVERSIZED_NAME, lambda one: one.status.phase == FAILED
    )
    path.unlink()
    return screen.wrap_text(f"{FAILED}, {found.status.reason}: {found.status.message}")


async def delete_request(context: DemoContext) -> list[str]:
    deleted_at = time.time()
    context.path(BERLIN, ResourceRequest, REQUEST_NAME).unlink()
    name = f"{context.reservation}-provider"
    over = await context.wait_for(
        context.provider, ProviderInstruction, name, lambda one: one.status.phase == WITHDRAWN
    )
    await context.wait_deleted(BERLIN, ResourceRequest, REQUEST_NAME)
    seconds = screen.format_seconds(time.time() - deleted_at)
    return screen.wrap_text(f"{context.provider}, after {seconds}: {over.status.message}")


async def check_released(context: DemoContext) -> list[str]:
    for name, before in context.available_before.items():
        now = await context.available(name)
        expect(
            name == PARIS or now == before,
            f"{name} has {_amounts_text(now)}, had {_amounts_text(before)}",
        )
    available = _amounts_text(context.available_before[context.provider])
    return [f"available in {context.provider}: {available}, exactly as before"]


async def run_audit(context: DemoContext) -> list[str]:
    ledger, found, _ = audit.audit_store(str(context.deployment.store))
    expect(not found, "; ".join(found))
    return screen.wrap_text(
        f"0 violations; clusters: {len(ledger.clusters)}, reservations:"
        f" {len(ledger.reservations)}, revision: {ledger.revision}"
    )


async def stop_processes(context: DemoContext) -> list[str]:
    living = [agent for name, agent in context.agents.items() if name != PARIS]
    codes = await asyncio.gather(
        *(asyncio.to_thread(process.stop) for process in (*living, context.broker))
    )
    expect(not any(codes), f"processes exited with codes {codes}")
    return ["Calls in flight finished, store closed, all exit codes 0"]


async def _wait_held(context: DemoContext) -> ProviderInstruction:
    name = f"{context.reservation}-provider"
    return await context.wait_for(
        context.provider, ProviderInstruction, name, lambda one: one.status.enforced
    )


def _since_request(context: DemoContext, moment: datetime | None) -> str:
    """Returns the time since the request was written."""
    return (
        ""
        if moment is None
        else screen.format_seconds(max(moment.timestamp() - context.requested_at, 0))
    )


def _offer_row(one: bodies.Cluster) -> tuple[str, ...]:
    offer = one.advertisement
    free = offer.resources.available or bodies.Quantities("0", "0")
    price = offer.cost.cpu_cost if offer.cost else ""
    return (
        offer.cluster_id,
        offer.region,
        str(free.cpu),
        str(free.memory),
        str(free.gpu or 0),
        price,
    )


def _candidate_row(one: bodies.Candidate) -> tuple[str, ...]:
    return (
        one.cluster_id,
        "yes" if one.fits else "no",
        "" if one.score is None else f"{one.score:.3f}",
        f"{float(one.price_per_hour):.3f} {one.currency}" if one.price_per_hour else "",
        ", ".join(one.refusals),
    )


def _amounts_text(amounts: bodies.Amounts) -> str:
    parts = [f"{amounts.cpu} CPU", f"{amounts.memory} memory"]
    return ", ".join([*parts, f"{amounts.gpu} GPU"] if amounts.gpu else parts)


ADMIN_NAME = "admin"
STEP_TIMEOUT = 20.0
"""Timeout of a step in seconds."""

_POLL_SECONDS = 0.005
_AGENT_FLAGS = (
    "--advertisement-requeue-interval=1s",
    "--advertisement-validity=3s",
    "--advertisement-damping=200ms",
)
"""Short intervals, so that the demo detects a lost provider within seconds."""

ResultT = TypeVar("ResultT")


class DemoContext:
    """The processes of the demo and its state."""

    def __init__(
        self,
        deployment: TemporaryDeployment,
        broker: BrokerProcess,
        agents: dict[str, AgentProcess],
    ) -> None:
        self.deployment = deployment
        self.broker = broker
        self.agents = agents
        self.requested_at = 0.0
        """When the ResourceRequest was written, by `time.time`, which file timestamps use too."""
        self.reservation = ""
        self.provider = ""
        self.available_before: dict[str, bodies.Amounts] = {}
        """Available resources of each cluster before the first reservation."""
        self._objects = {
            name: FileObjects(agent.objects, clock.utc_now) for name, agent in agents.items()
        }

    def client(self, name: str) -> BrokerClient:
        """Returns a client with the certificate of a cluster or of the administrator."""
        role = Role.ADMIN if name == ADMIN_NAME else Role.CLUSTER
        return BrokerClient(self.broker.url, self.deployment.certificate(name, role))

    def path(self, cluster: str, kind: type[Kind], name: str) -> Path:
        """Returns the file of an object."""
        return self.agents[cluster].objects / kind.plural / f"default.{name}.yaml"

    async def find(self, cluster: str, kind: type[Kind], name: str) -> Kind | None:
        return await self._objects[cluster].find(kind, f"default/{name}")

    async def wait_for(
        self, cluster: str, kind: type[Kind], name: str, wanted: Callable[[Kind], bool]
    ) -> Kind:
        """Waits until an object of a cluster fulfils the condition."""

        async def poll() -> Kind | None:
            found = await self.find(cluster, kind, name)
            return found if found is not None and wanted(found) else None

        return await _poll_until(
            poll, f"{kind.kind} {name} of {cluster} did not reach the expected state"
        )

    async def wait_deleted(self, cluster: str, kind: type[Kind], name: str) -> None:
        """Waits until an object of a cluster has been deleted."""

        async def poll() -> bool | None:
            return True if await self.find(cluster, kind, name) is None else None

        await _poll_until(poll, f"{kind.kind} {name} of {cluster} was not deleted")

    async def available(self, cluster: str) -> bodies.Amounts:
        async with self.client(ADMIN_NAME) as admin:
            found = (await admin.get_cluster(cluster)).advertisement.resources.available
        return found or bodies.Quantities("0", "0")


async def _poll_until(poll: Callable[[], Awaitable[ResultT | None]], otherwise: str) -> ResultT:
    deadline = time.monotonic() + STEP_TIMEOUT
    while (seen := await poll()) is None:
        expect(time.monotonic() < deadline, otherwise)
        await asyncio.sleep(_POLL_SECONDS)
    return seen


@contextmanager
def open_context(deployment: TemporaryDeployment, broker: BrokerProcess) -> Iterator[DemoContext]:
    """Starts the agents; stops them at exit."""
    with ExitStack() as stack:
        agents = {
            name: stack.enter_context(
                deployment.agent(
                    name,
                    broker,
                    _write_file(deployment.directory / f"{name}.yaml", text),
                    *_AGENT_FLAGS,
                )
            )
            for name, text in CLUSTER_DESCRIPTIONS.items()
        }
        yield DemoContext(deployment, broker, agents)


def expect(holds: bool, otherwise: str) -> None:
    """Raises unless the result of a step is as expected."""
    if not holds:
        raise KubelendError(otherwise)


def _write_file(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


BERLIN, TURIN, ZURICH, PARIS = "berlin", "turin", "zurich", "paris"

CLUSTER_DESCRIPTIONS = {
    # Busy, and without GPUs: the requester.
    BERLIN: """
region: eu-central
seed: 1
nodes:
  - {count: 3, capacity: {cpu: 16, memory: 64Gi}}
pods:
  - {share: 90%, requests: {cpu: 500m, memory: 2Gi}}
cost: {cpuCost: "0.03", memoryCost: "0.004", currency: EUR}
""",
    # With GPUs, cheap.
    TURIN: """
region: eu-south
seed: 2
nodes:
  - {count: 2, capacity: {cpu: 24, memory: 96Gi, nvidia.com/gpu: 4}}
pods:
  - {count: 20, requests: {cpu: "1", memory: 3Gi}}
  - {count: 4, requests: {cpu: 500m, memory: 2Gi, nvidia.com/gpu: 1}}
cost: {cpuCost: "0.03", memoryCost: "0.004", gpuCost: "0.60", currency: EUR}
""",
    # With GPUs, above the price limit of the request.
    ZURICH: """
region: eu-central
seed: 3
nodes:
  - {count: 2, capacity: {cpu: 32, memory: 128Gi, nvidia.com/gpu: 8}}
pods:
  - {count: 30, requests: {cpu: 200m, memory: 512Mi}}
cost: {cpuCost: "0.20", memoryCost: "0.020", gpuCost: "4.50", currency: EUR}
""",
    # Idle and cheapest: the first provider, whose agent is killed.
    PARIS: """
region: eu-west
seed: 4
nodes:
  - {count: 2, capacity: {cpu: 16, memory: 64Gi, nvidia.com/gpu: 2}}
pods:
  - {count: 6, requests: {cpu: 200m, memory: 512Mi}}
cost: {cpuCost: "0.02", memoryCost: "0.003", gpuCost: "0.45", currency: EUR}
""",
}

REQUEST_SPEC = """\
requestedCPU: "4"
requestedMemory: 16Gi
requestedGPU: "1"
duration: 2h
constraints: {maxPricePerHour: "2", currency: EUR}
"""

RESERVATION_REQUEST = bodies.ReservationRequest(
    bodies.Quantities("4", "16Gi", gpu="1"),
    duration="2h",
    constraints=bodies.Constraints(max_price_per_hour="2", currency="EUR"),
)


def request_manifest(name: str, spec: str) -> str:
    """Returns the manifest of a ResourceRequest."""
    lines = "".join(f"  {line}\n" for line in spec.splitlines())
    head = "apiVersion: rear.fluidos.eu/v1alpha1\nkind: ResourceRequest\n"
    return f"{head}metadata: {{name: {name}}}\nspec:\n{lines}"


REQUEST_MANIFEST = request_manifest("training", REQUEST_SPEC)
OVERSIZED_MANIFEST = request_manifest("too-much", 'requestedCPU: "60"\nrequestedMemory: 16Gi\n')
