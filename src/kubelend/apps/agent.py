"""The composition root of the agent process.

Started by `apps.agent_process`. Its imports determine the memory footprint of the agent, so it must not
import numpy, terminal libraries or `cryptography`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from aiohttp.web_response import Response

from kubelend.agent.health import ActiveAgentGate, ComponentHealth
from kubelend.agent.holds import HoldTable
from kubelend.agent.metrics import CONTENT_TYPE, AgentMetrics, MetricsInput
from kubelend.agent.peering import PEERING_FINALIZER, PeeringReconciler
from kubelend.agent.placeholder_reconciler import PlaceholderReconciler
from kubelend.agent.ports import BrokerCommunicator, HandshakeExchange
from kubelend.agent.provider import ProviderConfig, ProviderReconciler
from kubelend.agent.publisher import Collector, LocalPublisher, Publisher
from kubelend.agent.requester import ResourceRequestReconciler
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.agent.stream import InstructionListener
from kubelend.apps import agent_environment, agent_launcher, agent_peering
from kubelend.apps.agent_environment import AgentEnvironment
from kubelend.apps.agent_launcher import AgentCertificateRenewer, AgentLaunch
from kubelend.apps.agent_peering import AgentPeering
from kubelend.apps.agent_settings import AgentSettings
from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions, MetricsMiddleware, SessionMiddleware
from kubelend.core.errors import InvalidInput, InvalidSettings, KubelendError
from kubelend.core.inventory import Inventory
from kubelend.kits import logs, tasks
from kubelend.transports import server
from kubelend.transports.listener import ConnectionLimits

COMPONENTS = (
    *("collector", "publisher", "advertisement", "stream"),
    *("requester", "provider", "placeholders", "peering", "certificate", "objects"),
)

OBJECT_CHECK_INTERVAL = timedelta(seconds=2)

UNEXPECTED, USAGE = 1, 2
"""Exit codes, the same as in `cli.output`."""

RootCoroutine = Coroutine[object, object, None]

if TYPE_CHECKING:
    from kubelend.peerings.slice_decision import LentReservation

log = structlog.get_logger("kubelend.agent")


def main() -> None:
    """Entry point of the agent process; reads its settings from the environment."""
    try:
        run_agent(agent_launcher.read_launch(os.environ))
    except KubelendError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)  # noqa: T201 - as `kubelend` prints it
        sys.exit(USAGE if isinstance(error, InvalidInput | InvalidSettings) else UNEXPECTED)


def run_agent(launched: AgentLaunch) -> None:
    """Runs until SIGINT or SIGTERM; raises if it cannot start or a root task fails."""
    logs.setup(launched.settings.log_level, launched.settings.log_format)
    if launched.settings.cleanup:
        from kubelend.apps import agent_cleanup

        asyncio.run(agent_cleanup.clean_up(launched.settings))
    else:
        asyncio.run(serve_agent(launched))


async def serve_agent(launched: AgentLaunch) -> None:
    """Runs the agent in the current event loop."""
    async with open_agent(launched) as process:
        ended = await tasks.run_all(process.root_tasks() | {"signals": tasks.wait_for_signal()})
    if ended != "signals":
        raise KubelendError(f"root task {ended} ended unexpectedly")


class AgentApp:
    """An agent whose probe and metrics listeners are open; `root_tasks` returns the tasks to run."""

    def __init__(
        self,
        settings: AgentSettings,
        environment: AgentEnvironment,
        cluster: str,
        renew_at: datetime | None = None,
    ) -> None:
        self.health = ComponentHealth()
        self.ports: dict[str, int] = {}
        """Ports by listener: probes, metrics."""
        self._settings = settings
        self._renew_at = renew_at
        self._environment = environment
        self._cluster = cluster
        self._advertising = agent_environment.advertising_settings(settings, environment, cluster)
        self._inventory = Inventory()
        self._reservation_cache = ReservationCache()
        self._holds = HoldTable(
            self._inventory,
            environment.policy,
            enforce=settings.enforce,
            on_change=self._notify_changed,
        )
        self._active_gate = ActiveAgentGate()
        self._listener: InstructionListener | None = None
        self._publisher: Publisher | None = None
        self._provider: ProviderReconciler | None = None
        self._placeholders = self._make_placeholders()
        self.metrics = AgentMetrics(
            MetricsInput(
                cluster,
                self._inventory,
                self._reservation_cache,
                self.health,
                self._is_streaming,
                COMPONENTS,
                self._published_at,
            )
        )
        self.communicator: BrokerCommunicator | None = None
        self.exchange: HandshakeExchange | None = None
        self.peering = AgentPeering(None)
        self._on_handshake: list[Callable[[str], None]] = []
        # Before the probe listener opens, so that /readyz is never ok too early.
        for part in ("collector", "publisher", "stream") if settings.transport else ("collector",):
            self.health.require(part)

    def root_tasks(self) -> dict[str, RootCoroutine]:
        """Returns the root tasks. They stop in reverse order, so each may depend on those before it."""
        roots = (
            self._tasks_without_broker()
            if self.communicator is None
            else self._tasks_with_broker(self.communicator)
        )
        roots["objects"] = self._report_object_health()
        if self._environment.events is not None:
            roots["events"] = self._environment.events.run()
        return roots

    def _tasks_without_broker(self) -> dict[str, RootCoroutine]:
        environment = self._environment
        collector = Collector(
            environment.source, self._inventory, self.health, on_change=lambda: None
        )
        meter = LocalPublisher(
            self._advertising, self._inventory, environment.objects, self.health, environment.clock
        )
        return {"collector": collector.run(), "publisher": meter.run(collector.measured)}

    def _tasks_with_broker(self, broker: BrokerCommunicator) -> dict[str, RootCoroutine]:
        publisher = self._publisher = Publisher(
            settings=self._advertising,
            inventory=self._inventory,
            communicator=SessionMiddleware(broker, self._active_gate),
            reservations=self._reservation_cache,
            objects=self._environment.objects,
            health=self.health,
            clock=self._environment.clock,
        )
        collector = Collector(
            self._environment.source, self._inventory, self.health, self._notify_changed
        )
        provider = self._provider = self._make_provider(broker)
        self._listener = InstructionListener(
            broker,
            self._reservation_cache,
            self.health,
            poll_interval=self._settings.instruction_poll_interval,
        )
        return {
            "collector": collector.run(),
            "publisher": _restore_and_publish(publisher, provider, collector),
            "stream": self._listener.run(),
            "place": self._active_gate.run(),
            "requester": self._run_when_active(self._make_requester(broker).run),
            "provider": self._run_when_active(provider.run),
            **self._placeholder_task(provider),
            **self._peering_tasks(broker, provider),
            **self._renewal_task(),
        }

    def on_handshake(self, reservation: str) -> None:
        """The other cluster of a reservation has sent a handshake."""
        for notify in self._on_handshake:
            notify(reservation)

    async def _run_when_active(self, work: Callable[[], RootCoroutine]) -> None:
        await self._active_gate.wait()
        await work()

    def _make_requester(self, broker: BrokerCommunicator) -> ResourceRequestReconciler:
        return ResourceRequestReconciler(
            self._environment.objects,
            broker,
            self._reservation_cache,
            self.health,
            self._environment.clock,
            cluster_id=self._cluster,
            namespace=self._environment.namespace,
            finished_ttl=self._settings.finished_for,
            finalizers=(PEERING_FINALIZER,) if self.peering.requester is not None else (),
            emit=self._environment.emit,
        )

    def lent(self) -> dict[str, LentReservation]:
        """Returns the reservations that this cluster holds, by ID."""
        held = self._inventory.holds
        return agent_peering.lent_reservations(self._cluster, held, self._reservation_cache)

    def grant_of(self, reservation: str) -> str:
        """Returns the grant that the broker has sent with a reservation; empty if it has not."""
        return self._reservation_cache.grant(reservation)

    def _notify_changed(self) -> None:
        """Nodes, pods or holds have changed."""
        if self._publisher is not None:
            self._publisher.notify_changed()
        if self._placeholders is not None:
            self._placeholders.notify_changed()
        if self._provider is not None:
            self._provider.notify_measured()
        if self.peering.provider is not None:
            self.peering.provider.on_hold()

    def _make_placeholders(self) -> PlaceholderReconciler | None:
        environment = self._environment
        if environment.hold_pods is None:
            return None
        return PlaceholderReconciler(
            environment.namespace,
            self._inventory,
            environment.objects,
            environment.hold_pods,
            self.health,
            environment.clock,
        )

    def _placeholder_task(self, provider: ProviderReconciler) -> dict[str, RootCoroutine]:
        if self._placeholders is None:
            return {}
        return {"placeholders": self._run_with_holds(provider, self._placeholders.run)}

    async def _run_with_holds(
        self, provider: ProviderReconciler, work: Callable[[], RootCoroutine]
    ) -> None:
        """Without them, placeholders and slices of live reservations would be removed as left over."""
        await self._active_gate.wait()
        await provider.restore()
        await work()

    def _make_provider(self, broker: BrokerCommunicator) -> ProviderReconciler:
        settings, environment = self._settings, self._environment
        config = ProviderConfig(
            self._cluster,
            environment.namespace,
            settings.finished_for,
            has_placeholders=self._placeholders is not None,
            refuses_unheld=settings.refuse_unheld,
        )
        return ProviderReconciler(
            config,
            environment.objects,
            broker,
            self._reservation_cache,
            self._holds,
            self.health,
            environment.clock,
            emit=environment.emit,
        )

    def _peering_tasks(
        self, broker: BrokerCommunicator, provider: ProviderReconciler
    ) -> dict[str, RootCoroutine]:
        """Both sides of the peering: with providers, and of requesters with this cluster."""
        environment, cache, peering = self._environment, self._reservation_cache, self.peering
        reconciler = PeeringReconciler(
            environment.objects,
            broker,
            cache,
            peering.requester,
            self.health,
            environment.clock,
            emit=environment.emit,
        )
        self._on_handshake.append(reconciler.on_peering_change)
        found = {"peering": self._run_when_active(reconciler.run)}
        if peering.provider is not None:
            self._on_handshake.append(peering.provider.on_handshake)
            cache.subscribe(peering.provider.on_change)
            found["lending"] = self._run_with_holds(provider, peering.provider.run)
        return found

    def _renewal_task(self) -> dict[str, RootCoroutine]:
        if not self._settings.auto_renew or self._settings.transport != "http":
            return {}
        directory, url = Path(self._settings.broker_cert_path), self._settings.broker_url
        renewer = AgentCertificateRenewer(
            directory, url, self.health, self._environment.clock, self._renew_at
        )
        return {"certificate": renewer.run()}

    async def _report_object_health(self) -> None:
        """Reports objects that cannot be watched or decoded; single bad objects do not make it unready."""
        while True:
            unseen = self._environment.watch_error()
            problem = unseen or self._environment.object_error()
            self.health.report("objects", problem, is_partial=not unseen)
            await asyncio.sleep(OBJECT_CHECK_INTERVAL.total_seconds())

    def _is_streaming(self) -> bool:
        return self._listener is not None and self._listener.is_connected

    def _published_at(self) -> datetime | None:
        return None if self._publisher is None else self._publisher.published_at


@asynccontextmanager
async def open_agent(launched: AgentLaunch) -> AsyncIterator[AgentApp]:
    """Builds the agent and opens its listeners. At exit the agent session at the broker is closed."""
    settings = launched.settings
    async with AsyncExitStack() as stack:
        environment = await stack.enter_async_context(agent_environment.open_environment(settings))
        cluster = settings.cluster_id or await environment.source.identity()
        process = AgentApp(settings, environment, cluster, launched.renew_at)
        await _connect(settings, process, stack)
        process.ports = await _listen(settings, process, stack)
        mode = await agent_peering.select_peering(settings, environment)
        if process.exchange is not None:
            process.peering = agent_peering.make_peering(
                mode,
                settings,
                cluster,
                environment,
                process.exchange,
                process.lent,
                process.grant_of,
            )
        broker = (
            f"namespace {settings.broker_namespace}"
            if settings.transport == "kubernetes"
            else settings.broker_url
        )
        keys = {"cluster": cluster, "source": settings.source, "peering": mode}
        log.info("Agent started", **keys, broker=broker)
        yield process


async def _connect(settings: AgentSettings, process: AgentApp, stack: AsyncExitStack) -> None:
    options = CommunicatorOptions(
        url=settings.broker_url,
        certificates=Path(settings.broker_cert_path),
        timeout=settings.broker_timeout,
        instance=uuid.uuid4().hex,
        kubeconfig=settings.broker_kubeconfig,
        namespace=settings.broker_namespace,
        on_reload_error=lambda problem: log.warning(
            "Certificate reload failed", error=str(problem)
        ),
        on_handshake=process.on_handshake,
    )
    communicator = await factory.open_communicator(settings.transport, options)
    if communicator is not None:
        stack.push_async_callback(communicator.close)
        process.communicator = MetricsMiddleware(communicator, process.metrics.observe_call)
        process.exchange = communicator


async def _listen(
    settings: AgentSettings, process: AgentApp, stack: AsyncExitStack
) -> dict[str, int]:
    ports = {}
    limits = server.ServerLimits(connections=ConnectionLimits(connections=64))
    probes = server.serve_probes(lambda: process.health.not_ready_reason)
    for name, address, handler in (
        ("probes", settings.health_probe_bind_address, probes),
        ("metrics", settings.metrics_bind_address, _metrics_handler(process.metrics)),
    ):
        if address is not None:
            ports[name] = await stack.enter_async_context(
                server.serve_http(handler, address.host, address.port, limits)
            )
            log.info("Listening", component=name, host=address.host, port=ports[name])
    return ports


def _metrics_handler(metrics: AgentMetrics) -> server.HttpHandler:
    async def scrape() -> Response:
        return Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return server.serve_pages({"/metrics": scrape})


async def _restore_and_publish(
    publisher: Publisher, provider: ProviderReconciler, collector: Collector
) -> None:
    """Restores the holds of the previous process first: the advertisement must not offer them."""
    await provider.restore()
    await publisher.run(collector.measured)
