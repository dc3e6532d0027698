"""The agent process: everything it is made of, put together here and nowhere else.

Started by `apps.agent_process`. What it imports is its footprint: no numpy, no terminal, no certificates.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import structlog
from aiohttp.web_response import Response

from kubelend.agent.collecting import Collector
from kubelend.agent.listening import Listener
from kubelend.agent.measuring import Meter
from kubelend.agent.metrics import CONTENT_TYPE, Metrics, Watched
from kubelend.agent.peering import PeeringKeeper
from kubelend.agent.place import Place
from kubelend.agent.ports import BrokerCommunicator
from kubelend.agent.promises import Promises
from kubelend.agent.providing import Lender, Provider
from kubelend.agent.publishing import Publisher
from kubelend.agent.requesting import Requester
from kubelend.agent.reservations import Reservations
from kubelend.agent.standing import Standing
from kubelend.api import pages
from kubelend.apps import launching, stopping, surroundings
from kubelend.apps.agent_certificate import CertificateKeeper
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.flags import Address
from kubelend.apps.launching import Launch
from kubelend.apps.surroundings import Surroundings
from kubelend.communicators import factory
from kubelend.communicators.delayed import Delayed
from kubelend.communicators.measured import Measured
from kubelend.communicators.options import Options
from kubelend.communicators.placed import Placed
from kubelend.core.errors import InvalidInput, InvalidSettings, KubelendError
from kubelend.core.inventory import Inventory
from kubelend.kits import logs, tasks
from kubelend.transports import http_server
from kubelend.transports.admission import Room

PARTS = (
    *("collector", "publisher", "advertisement", "stream"),
    *("requester", "provider", "peering", "certificate", "objects"),
)

LOOK_EVERY = timedelta(seconds=2)

UNEXPECTED, USAGE = 1, 2
"""Exit codes, as `cli.exits` has them."""

Root = Coroutine[object, object, None]

log = structlog.get_logger("kubelend.agent")


def main() -> None:
    """The process that `apps.launching` starts, by its settings in the environment."""
    try:
        run(launching.read(os.environ))
    except KubelendError as problem:
        print("error:", " ".join(str(problem).split()), file=sys.stderr)  # noqa: T201 - as `kubelend` says it
        sys.exit(USAGE if isinstance(problem, InvalidInput | InvalidSettings) else UNEXPECTED)


def run(launched: Launch) -> None:
    """Work until told to stop (SIGINT, SIGTERM); raises if it cannot start or cannot go on."""
    logs.setup(launched.settings.log_level, launched.settings.log_format)
    asyncio.run(serve(launched))


async def serve(launched: Launch) -> None:
    """The same inside an event loop."""
    async with started(launched) as process:
        ended = await tasks.run_all(process.roots() | {"signals": stopping.told()})
    if ended != "signals":
        raise KubelendError(f"the {ended} has ended, which it never should")


class Process:
    """An agent that listens, and does all else once its root tasks run."""

    def __init__(
        self,
        settings: AgentSettings,
        around: Surroundings,
        cluster: str,
        renew_at: datetime | None = None,
    ) -> None:
        self.standing = Standing()
        self.ports: dict[str, int] = {}
        """Where it listens, by what for: probes, metrics."""
        self._settings = settings
        self._renew_at = renew_at
        self._around = around
        self._cluster = cluster
        self._advertising = surroundings.advertising(settings, around, cluster)
        self._inventory = Inventory()
        self._reservations = Reservations()
        self._place = Place()
        self._listener: Listener | None = None
        self._advertiser: Publisher | None = None
        self.metrics = Metrics(
            Watched(
                cluster,
                self._inventory,
                self._reservations,
                self.standing,
                self._streams,
                PARTS,
                self._published_at,
            )
        )
        self.communicator: BrokerCommunicator | None = None
        # Before anybody can ask whether it is ready: probes answer from the first moment on.
        for part in (
            ("collector", "publisher", "stream") if settings.broker_transport else ("collector",)
        ):
            self.standing.expect(part)

    def roots(self) -> dict[str, Root]:
        """Each may use those before it until it has stopped."""
        dies_after = self._around.dies_after
        roots = self._alone() if self.communicator is None else self._with(self.communicator)
        roots["objects"] = self._look_at_objects()
        return roots | ({"fate": _die(dies_after)} if dies_after else {})

    def _alone(self) -> dict[str, Root]:
        around = self._around
        collector = self._collector(lambda: None)
        meter = Meter(
            self._advertising, self._inventory, around.objects, self.standing, around.clock
        )
        return {"collector": collector.run(), "publisher": meter.run(collector.measured)}

    def _with(self, broker: BrokerCommunicator) -> dict[str, Root]:
        publisher = self._advertiser = self._publisher(Placed(broker, self._place))
        collector = self._collector(publisher.changed)
        provider = self._provider(broker, publisher)
        self._listener = self._new_listener(broker)
        return {
            "collector": collector.run(),
            "publisher": _publish(publisher, provider, collector),
            "stream": self._listener.run(),
            "place": self._place.run(),
            "requester": self._in_its_place(self._requester(broker).run),
            "provider": self._in_its_place(provider.run),
            "peering": self._in_its_place(self._peering(broker).run),
            **self._renewal(),
        }

    async def _in_its_place(self, work: Callable[[], Root]) -> None:
        await self._place.ours()
        await work()

    def _collector(self, on_change: surroundings.Callback) -> Collector:
        return Collector(self._around.source, self._inventory, self.standing, on_change)

    def _publisher(self, broker: BrokerCommunicator) -> Publisher:
        return Publisher(
            settings=self._advertising,
            inventory=self._inventory,
            communicator=broker,
            reservations=self._reservations,
            objects=self._around.objects,
            standing=self.standing,
            clock=self._around.clock,
        )

    def _new_listener(self, broker: BrokerCommunicator) -> Listener:
        poll_every = self._settings.instruction_poll_interval
        return Listener(broker, self._reservations, self.standing, poll_every=poll_every)

    def _requester(self, broker: BrokerCommunicator) -> Requester:
        return Requester(
            self._around.objects,
            broker,
            self._reservations,
            self.standing,
            self._around.clock,
            cluster_id=self._cluster,
            namespace=self._around.namespace,
            finished_for=self._settings.finished_for,
        )

    def _provider(self, broker: BrokerCommunicator, publisher: Publisher) -> Provider:
        settings, around = self._settings, self._around
        promises = Promises(
            self._inventory, around.policy, enforce=settings.enforce, on_holds=publisher.changed
        )
        lender = Lender(self._cluster, around.namespace or "default", settings.finished_for)
        return Provider(
            lender,
            around.objects,
            broker,
            self._reservations,
            promises,
            self.standing,
            around.clock,
        )

    def _peering(self, broker: BrokerCommunicator) -> PeeringKeeper:
        around = self._around
        peering = surroundings.peering(self._settings, self._cluster)
        return PeeringKeeper(
            around.objects, broker, self._reservations, peering, self.standing, around.clock
        )

    def _renewal(self) -> dict[str, Root]:
        if not self._settings.auto_renew or self._settings.broker_transport != "http":
            return {}
        directory, url = Path(self._settings.broker_cert_path), self._settings.broker_url
        keeper = CertificateKeeper(
            directory, url, self.standing, self._around.clock, self._renew_at
        )
        return {"certificate": keeper.run()}

    async def _look_at_objects(self) -> None:
        """What is wrong with single objects is for their authors to see, and stops nothing else."""
        while True:
            unseen = self._around.unseen()
            problem = unseen or self._around.problem()
            self.standing.report("objects", problem, is_partial=not unseen)
            await asyncio.sleep(LOOK_EVERY.total_seconds())

    def _streams(self) -> bool:
        return self._listener is not None and self._listener.connected

    def _published_at(self) -> datetime | None:
        return None if self._advertiser is None else self._advertiser.published_at


@asynccontextmanager
async def started(launched: Launch) -> AsyncIterator[Process]:
    """Everything put together and listening. At the end the broker hears that this agent is gone."""
    settings = launched.settings
    async with AsyncExitStack() as stack:
        around = await stack.enter_async_context(surroundings.opened(settings))
        cluster = settings.cluster_id or await around.source.identity()
        process = Process(settings, around, cluster, launched.renew_at)
        process.communicator = await _connect(settings, around, process.metrics, stack)
        process.ports = await _listen(settings, process, stack)
        log.info("started", cluster=cluster, source=settings.source, broker=_place(settings))
        yield process


def _place(settings: AgentSettings) -> str:
    """Where the broker is spoken with."""
    if settings.broker_transport == "kubernetes":
        return f"namespace {settings.broker_namespace}"
    return settings.broker_url


async def _connect(
    settings: AgentSettings, around: Surroundings, metrics: Metrics, stack: AsyncExitStack
) -> BrokerCommunicator | None:
    options = Options(
        url=settings.broker_url,
        certificates=Path(settings.broker_cert_path),
        timeout=settings.broker_timeout,
        instance=uuid.uuid4().hex,
        kubeconfig=settings.broker_kubeconfig,
        namespace=settings.broker_namespace,
        report=lambda problem: log.warning("certificates not taken up", problem=str(problem)),
    )
    communicator = await factory.open_communicator(settings.broker_transport, options)
    if communicator is None:
        return None
    stack.push_async_callback(communicator.close)
    if around.network_delay:
        communicator = Delayed(communicator, around.network_delay)
    return Measured(communicator, metrics.called)


class _Listener(NamedTuple):
    what: str
    address: Address | None
    handler: pages.HttpHandler


async def _listen(
    settings: AgentSettings, process: Process, stack: AsyncExitStack
) -> dict[str, int]:
    ports = {}
    limits = http_server.Limits(room=Room(connections=64))
    for what, address, handler in (
        _Listener("probes", settings.health_probe_bind_address, _probes(process.standing)),
        _Listener("metrics", settings.metrics_bind_address, _scrape(process.metrics)),
    ):
        if address is not None:
            ports[what] = await stack.enter_async_context(
                http_server.listening(handler, address.host, address.port, limits)
            )
            log.info("listening", what=what, host=address.host, port=ports[what])
    return ports


def _probes(standing: Standing) -> pages.HttpHandler:
    async def healthz() -> Response:
        return Response(text="ok")

    async def readyz() -> Response:
        return pages.readiness(standing.unready)

    return pages.serve({"/healthz": healthz, "/readyz": readyz})


def _scrape(metrics: Metrics) -> pages.HttpHandler:
    async def scrape() -> Response:
        return Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return pages.serve({"/metrics": scrape})


async def _publish(publisher: Publisher, provider: Provider, collector: Collector) -> None:
    """What a former process has promised is held before the first advertisement speaks of what is free."""
    await provider.restore()
    await publisher.run(collector.measured)


async def _die(after: timedelta) -> None:
    """What a simulated cluster's description asks for: the end of a process that nobody expected."""
    await asyncio.sleep(after.total_seconds())
    os.kill(os.getpid(), signal.SIGKILL)
