"""The command `kubelend dev demo`: runs the steps in order and prints their results.

Each step acts, checks its effect and returns lines to print. With `--kubernetes` the clusters of the lab are
started, walked through and removed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kubelend.agent import conditions
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.core.lifecycle import Role
from kubelend.demo import screen
from kubelend.demo.screen import Display
from kubelend.envtest import processes, waiting
from kubelend.envtest.processes import AgentProcess, BrokerProcess, TemporaryDeployment
from kubelend.kits import logs, tables, tasks
from kubelend.lab import background, walkthrough
from kubelend.lab.state import DIRECTORY_VARIABLE, LabDirectory, LabState
from kubelend.sources import file_objects
from kubelend.stores import factory
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.objects import Kind, ProviderInstruction, ReservationInstruction, ResourceRequest

REQUEST_NAME, OVERSIZED_NAME = "training", "too-much"
FAILED, WITHDRAWN = "Failed", "Withdrawn"
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
_REFRESH_SECONDS = 0.3

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

    def client(self, name: str) -> BrokerClient:
        """Returns a client with the certificate of a cluster or of the administrator."""
        role = Role.ADMIN if name == ADMIN_NAME else Role.CLUSTER
        return BrokerClient(self.broker.url, self.deployment.certificate(name, role))

    def manifest(self, cluster: str, name: str) -> Path:
        """Returns the file in which a user requests resources."""
        requests = self.agents[cluster].objects / file_objects.REQUESTS_DIRECTORY
        return requests / f"default.{name}.yaml"

    async def wait_request(
        self, wanted: Callable[[ResourceRequest], bool], name: str = REQUEST_NAME
    ) -> ResourceRequest:
        return await self._wait_for(BERLIN, ResourceRequest, name, wanted)

    async def wait_use(
        self, wanted: Callable[[ReservationInstruction], bool]
    ) -> ReservationInstruction:
        return await self._wait_for(BERLIN, ReservationInstruction, self.reservation, wanted)

    async def wait_hold(self, wanted: Callable[[ProviderInstruction], bool]) -> ProviderInstruction:
        name = f"{self.reservation}-provider"
        return await self._wait_for(self.provider, ProviderInstruction, name, wanted)

    async def wait_deleted(self) -> None:
        """Waits until the ResourceRequest has been deleted."""

        async def is_deleted() -> bool:
            return self._find(BERLIN, ResourceRequest, REQUEST_NAME) is None

        otherwise = f"ResourceRequest {REQUEST_NAME} of {BERLIN} was not deleted"
        await waiting.until(is_deleted, otherwise, STEP_TIMEOUT, poll=_POLL_SECONDS)

    async def available(self, cluster: str) -> bodies.Amounts:
        async with self.client(ADMIN_NAME) as admin:
            found = (await admin.get_cluster(cluster)).advertisement.resources.available
        return found or bodies.Quantities("0", "0")

    async def _wait_for(
        self, cluster: str, kind: type[Kind], name: str, wanted: Callable[[Kind], bool]
    ) -> Kind:
        async def find() -> Kind | None:
            found = self._find(cluster, kind, name)
            return found if found is not None and wanted(found) else None

        otherwise = f"{kind.kind} {name} of {cluster} did not reach the expected state"
        return await waiting.until(find, otherwise, STEP_TIMEOUT, poll=_POLL_SECONDS)

    def _find(self, cluster: str, kind: type[Kind], name: str) -> Kind | None:
        return file_objects.read_object(self.agents[cluster].objects, kind, f"default/{name}")


@contextmanager
def open_context(deployment: TemporaryDeployment, broker: BrokerProcess) -> Iterator[DemoContext]:
    """Starts the agents; stops them at exit."""
    with ExitStack() as stack:
        agents = {
            name: stack.enter_context(deployment.simulated_agent(name, broker, text, *_AGENT_FLAGS))
            for name, text in CLUSTER_DESCRIPTIONS.items()
        }
        yield DemoContext(deployment, broker, agents)


def expect(holds: bool, otherwise: str) -> None:
    """Raises unless the result of a step is as expected."""
    if not holds:
        raise KubelendError(otherwise)


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
    path = context.manifest(BERLIN, REQUEST_NAME)
    path.write_text(REQUEST_MANIFEST, "utf-8")
    context.requested_at = time.time()
    found = await context.wait_request(lambda one: bool(one.status.reservation_name))
    context.reservation = found.status.reservation_name
    context.provider = found.status.target_cluster_id
    expect(context.provider == PARIS, f"expected provider {PARIS}, but got {context.provider}")
    lines = [f"spec in {path.name}:", *(f"  {line}" for line in REQUEST_SPEC.splitlines())]
    return [*lines, f"{context.reservation} is reserved in {context.provider}"]


async def check_reserved(context: DemoContext) -> list[str]:
    before = context.available_before[context.provider]
    now = await context.available(context.provider)
    expect(before != now, f"{context.provider} still has {_amounts_text(now)} available")
    return [
        f"available in {context.provider} before: {_amounts_text(before)}",
        f"available in {context.provider} now:    {_amounts_text(now)}",
    ]


async def check_instructions(context: DemoContext) -> list[str]:
    use = await context.wait_use(lambda one: one.status.delivered)
    hold = await context.wait_hold(lambda one: one.status.enforced)
    rows = [
        (cluster, found.spec.message, _since_request(context, found.metadata.creation_timestamp))
        for cluster, found in ((BERLIN, use), (context.provider, hold))
    ]
    return tables.align_columns(("CLUSTER", "INSTRUCTION", "AFTER"), rows, right=(2,))


async def show_conditions(context: DemoContext) -> list[str]:
    reason = conditions.READY, conditions.NO_PEERING
    found = await context.wait_request(
        lambda one: conditions.has_reason(one.status.conditions, *reason)
    )
    rows = [(one.type, one.status, one.reason) for one in found.status.conditions]
    return [
        *tables.align_columns(("CONDITION", "STATUS", "REASON"), rows),
        *screen.wrap_text(f"{found.status.phase}: {found.status.message}"),
    ]


async def kill_provider(context: DemoContext) -> list[str]:
    lost, killed_at = context.provider, time.time()
    await asyncio.to_thread(context.agents[lost].kill)
    found = await context.wait_request(lambda one: one.status.target_cluster_id not in {"", lost})
    context.provider = found.status.target_cluster_id
    seconds = tables.format_seconds(time.time() - killed_at)
    return [
        *screen.wrap_text(
            f"{context.reservation} failed over from {lost} to {context.provider} after {seconds}"
        ),
        *screen.wrap_text(f"{BERLIN}: {found.status.message}"),
    ]


async def check_new_provider(context: DemoContext) -> list[str]:
    hold = await context.wait_hold(lambda one: one.status.enforced)
    use = await context.wait_use(lambda one: one.spec.target_cluster_id == context.provider)
    return [f"{context.provider}: {hold.spec.message}", f"{BERLIN}: {use.spec.message}"]


async def reject_oversized_request(context: DemoContext) -> list[str]:
    path = context.manifest(BERLIN, OVERSIZED_NAME)
    path.write_text(OVERSIZED_MANIFEST, "utf-8")
    found = await context.wait_request(lambda one: one.status.phase == FAILED, OVERSIZED_NAME)
    path.unlink()
    return screen.wrap_text(f"{FAILED}, {found.status.reason}: {found.status.message}")


async def delete_request(context: DemoContext) -> list[str]:
    deleted_at = time.time()
    context.manifest(BERLIN, REQUEST_NAME).unlink()
    over = await context.wait_hold(lambda one: one.status.phase == WITHDRAWN)
    await context.wait_deleted()
    seconds = tables.format_seconds(time.time() - deleted_at)
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
    ledger, found, _ = factory.audit_store(str(context.deployment.store))
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


def _since_request(context: DemoContext, moment: datetime | None) -> str:
    """Returns the time since the request was written."""
    if moment is None:
        return ""
    return tables.format_seconds(max(moment.timestamp() - context.requested_at, 0))


def _offer_row(one: bodies.Cluster) -> tuple[str, ...]:
    offer = one.advertisement
    free = offer.resources.available or bodies.Quantities("0", "0")
    price = offer.cost.cpu_cost if offer.cost else ""
    amounts = str(free.cpu), str(free.memory), str(free.gpu or 0)
    return offer.cluster_id, offer.region, *amounts, price


def _candidate_row(one: bodies.Candidate) -> tuple[str, ...]:
    return (
        one.cluster_id,
        "yes" if one.fits else "no",
        "" if one.score is None else f"{one.score:.3f}",
        f"{float(one.price_per_hour):.3f} {one.currency}" if one.price_per_hour else "",
        ", ".join(one.rejections),
    )


def _amounts_text(amounts: bodies.Amounts) -> str:
    parts = [f"{amounts.cpu} CPU", f"{amounts.memory} memory"]
    return ", ".join([*parts, f"{amounts.gpu} GPU"] if amounts.gpu else parts)


class Step(NamedTuple):
    """A title and a function that returns the lines to print."""

    title: str
    run: Callable[[DemoContext], Awaitable[list[str]]]


LIFECYCLE_STEPS = (
    Step("Start four agents, which measure and advertise their clusters", wait_for_agents),
    Step("Dry run: which clusters fit a request?", dry_run),
    Step("A user creates a ResourceRequest in berlin", create_request),
    Step("The broker has reserved the resources", check_reserved),
    Step("Both clusters have received an instruction", check_instructions),
    Step("It stays Reserved: nothing peers these clusters", show_conditions),
    Step("The agent of the provider paris is killed", kill_provider),
    Step("The new provider holds the resources", check_new_provider),
    Step("A request that fits nowhere fails with the reasons", reject_oversized_request),
    Step("The user deletes the ResourceRequest", delete_request),
    Step("All resources are available again", check_released),
)
FINAL_STEPS = (
    Step("Audit of the store", run_audit),
    Step("Stop all processes", stop_processes),
)


def run_demo(deployment: TemporaryDeployment, broker: BrokerProcess, *, stay: bool) -> None:
    """Runs all steps; raises at the first that has not the expected result."""
    # Log messages would disturb the output; failures arrive as exceptions.
    logs.setup("critical")
    with screen.open_display() as display:
        display.heading("Kubelend demo: one broker, four clusters, the lifecycle of a reservation")
        seconds = broker.wait_until_ready()
        started = f"{broker.url}, with a SQLite store and new certificates"
        display.step(1, "Start the broker", seconds, [started])
        with open_context(deployment, broker) as context:
            parts = {
                "fleet": _refresh_clusters(context, display),
                "story": _run_all(context, display, stay),
            }
            asyncio.run(tasks.run_all(parts))
        display.heading("\nDemo finished.")


async def _refresh_clusters(context: DemoContext, display: Display) -> None:
    """Updates the table of clusters while the broker runs."""
    async with context.client(ADMIN_NAME) as admin:
        while True:
            try:
                display.show_clusters(await admin.all_clusters())
            except KubelendError:
                display.show_clusters(())
            await asyncio.sleep(_REFRESH_SECONDS)


async def _run_all(context: DemoContext, display: Display, stay: bool) -> None:
    number = await _run_steps(LIFECYCLE_STEPS, context, display, 2)
    if stay:
        await _wait_for_ctrl_c(display, _example_commands(context))
    await _run_steps(FINAL_STEPS, context, display, number)


async def _run_steps(
    steps_to_run: tuple[Step, ...], context: DemoContext, display: Display, number: int
) -> int:
    for step in steps_to_run:
        began = time.perf_counter()
        display.begin(number, step.title)
        try:
            lines = await step.run(context)
        except KubelendError as error:
            raise KubelendError(f"step {number}, {step.title!r}: {error}") from error
        display.step(number, step.title, time.perf_counter() - began, lines)
        number += 1
    return number


async def _wait_for_ctrl_c(display: Display, commands: Sequence[str]) -> None:
    """Keeps everything running until Ctrl-C."""
    with _handle_ctrl_c() as pressed:
        display.show_commands("Running until Ctrl-C. Try in another terminal:", commands)
        await pressed.wait()


@contextmanager
def _handle_ctrl_c() -> Iterator[asyncio.Event]:
    """Makes Ctrl-C continue the demo instead of interrupting it."""
    pressed, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        loop.add_signal_handler(number, pressed.set)
    try:
        yield pressed
    finally:
        for number, handler in zip(numbers, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _example_commands(context: DemoContext) -> list[str]:
    called = _command_name()
    admin = context.deployment.certificate(ADMIN_NAME, Role.ADMIN)
    manifest = context.manifest(BERLIN, "mine")
    stored = file_objects.object_path(
        context.agents[BERLIN].objects, ResourceRequest, "default/mine"
    )
    return [
        f"export KUBELEND_BROKER_URL={context.broker.url}",
        f"export KUBELEND_CERT_PATH={context.deployment.certificate(BERLIN)}",
        f"cat > {manifest} <<'EOF'",
        *request_manifest("mine", REQUEST_SPEC).splitlines(),
        "EOF",
        f"cat {stored}",
        f"{called} get reservations",
        f"{called} explain --cpu 4 --memory 16Gi --gpu 1",
        f"rm {manifest}",
        f"{called} get clusters --cert-path {admin}",
        f"{called} audit check --store {context.deployment.store}",
    ]


def _command_name() -> str:
    return sys.argv[0] if Path(sys.argv[0]).name == "kubelend" else "kubelend"


def run_on_kubernetes(*, stay: bool) -> None:
    """Starts the clusters of the lab, runs its walkthrough, and stops and removes them."""
    background.check_prerequisites(uses_liqo=True)
    with (
        tasks.signals_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="kubelend-") as directory,
        screen.open_display() as display,
    ):
        home = LabDirectory(Path(directory) / "clusters")
        try:
            display.heading("Kubelend demo: from a ResourceRequest to a pod in another cluster")
            started = background.start_lab(home, display.show_line, uses_liqo=True)
            if started is None:
                raise Unavailable(f"{home.directory} is in use")
            display.heading("")
            asyncio.run(_walk_through(started, home, display, stay=stay))
        finally:
            # Ctrl-C in here would leave processes running.
            with tasks.defer_signals():
                background.stop_lab(home)
        display.heading("\nDemo finished.")


async def _walk_through(
    started: LabState, home: LabDirectory, display: Display, *, stay: bool
) -> None:
    def report(title: str, seconds: float) -> None:
        display.show_line(tables.title_line(title, seconds))

    await walkthrough.run_walkthrough(started, report, timedelta(minutes=1))
    if stay:
        directory = f"export {DIRECTORY_VARIABLE}={home.directory}"
        kubeconfig = f"export KUBECONFIG={home.kubeconfig}"
        lab = f"{_command_name()} dev lab"
        await _wait_for_ctrl_c(display, [directory, kubeconfig, f"{lab} test", f"{lab} status"])


def command(
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep everything running until Ctrl-C.")
    ] = False,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes", help="Use real API servers and Liqo, and run a pod in another cluster."
        ),
    ] = False,
) -> None:
    """Run a broker and four simulated clusters through the lifecycle of a reservation.

    Uses free ports and a temporary directory, which is removed at the end. `--kubernetes` requires
    `make kube-assets` and `make liqo-assets`.
    """
    if kubernetes:
        run_on_kubernetes(stay=stay)
        return
    with (
        processes.temporary_deployment() as deployment,
        deployment.broker(
            "--shutdown-timeout=5s", "--lost-after=1s", "--explain-others=names"
        ) as broker,
    ):
        run_demo(deployment, broker, stay=stay)
