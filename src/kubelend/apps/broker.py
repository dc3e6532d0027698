"""The composition root of the broker process, and its limit of open files (RLIMIT_NOFILE)."""

from __future__ import annotations

import asyncio
import gc
import resource
import ssl
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
import uvloop

import kubelend
from kubelend.api import app, enrolment
from kubelend.api.authentication import ConnectionMetrics
from kubelend.api.request import AppContext
from kubelend.apps import broker_kubernetes
from kubelend.apps.broker_kubernetes import LeadershipSetup
from kubelend.apps.certificates import CertificateManager
from kubelend.apps.flags import Address
from kubelend.apps.settings import BrokerSettings
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.audit_log import AuditLog
from kubelend.broker.membership import Membership
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.ports import Clock, OpenStore, Store
from kubelend.broker.service import Broker, BrokerRules, LimitService
from kubelend.core.commands import WaitLimits
from kubelend.core.enrolment import JoinPolicy
from kubelend.core.explanations import ExplainOthers
from kubelend.kits import clock, logs, tasks
from kubelend.kits import files as kits_files
from kubelend.kits.ratelimit import CoalescingTimer, RateLimiter
from kubelend.pki.grants import GrantKeys, GrantSigner
from kubelend.stores import factory
from kubelend.transports import server, tls
from kubelend.transports.listener import ConnectionLimits
from kubelend.transports.server import ReadBatching
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.routes import ROUTES

if TYPE_CHECKING:
    from kubelend.controllers.cluster_namespaces.manager import ClusterNamespaces
    from kubelend.controllers.manager import ControllerManager

READ_BATCH_SECONDS = 0.2
READ_BATCH_RATE = 20
"""Advertisements per second from which on they are batched: 600 clusters that advertise every 30 seconds."""
"""Seconds for which advertisements are batched. No agent waits for the response to its advertisement."""

log = structlog.get_logger("kubelend.broker")


def run_broker(settings: BrokerSettings) -> None:
    """Serves until SIGINT or SIGTERM; raises if it cannot start or a root task fails."""
    logs.setup(settings.log_level, settings.log_format)
    _tune_interpreter()
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_broker(settings))
    log.info("Stopped", exit_code=0)


def _tune_interpreter() -> None:
    """Tunes garbage collection and thread switching.

    Records contain no reference cycles, so there is little to collect. The store's thread needs the
    interpreter only briefly, but would wait 5 ms each time while the event loop is busy: a shorter switch
    interval halves the duration of a commit under load.
    """
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(0.0005)


async def serve_broker(settings: BrokerSettings) -> None:
    """Runs the broker in the current event loop."""
    async with open_broker(settings) as process:
        await tasks.run_all(process.root_tasks() | {"signals": tasks.wait_for_signal()})


class BrokerApp(NamedTuple):
    """A broker whose listeners are open; `root_tasks` returns the tasks to run."""

    broker: Broker
    audit_log: AuditLog
    metrics: BrokerMetrics
    ports: dict[str, int]
    """Ports by listener: probes, metrics, enrol, api."""
    certificates: CertificateManager | None = None
    """Set if the REST interface is served."""
    controller_manager: ControllerManager | None = None
    """Set if custom resources are served."""
    leadership: LeadershipSetup = LeadershipSetup()
    cluster_namespaces: ClusterNamespaces | None = None
    """Set if agents with the kubernetes transport are served."""

    def root_tasks(self) -> dict[str, Coroutine[object, object, None]]:
        # First, so that it stops last: the leader holds its lease until everything else has stopped.
        roots = {name: task.run() for name, task in self.leadership.tasks.items()}
        roots |= {"broker": self.broker.run(), "audit log": self.audit_log.run()}
        if self.certificates is not None:
            roots["certificates"] = self.certificates.run()
        if self.controller_manager is not None:
            roots["objects"] = self.controller_manager.run()
        if self.cluster_namespaces is not None:
            roots["cluster namespaces"] = self.cluster_namespaces.run()
        return roots


@asynccontextmanager
async def open_broker(
    settings: BrokerSettings, *, open_store: OpenStore | None = None, now: Clock = clock.utc_now
) -> AsyncIterator[BrokerApp]:
    """Builds the broker and opens its listeners. At exit, calls in progress are finished."""
    _warn_about_file_modes(settings)
    metrics = BrokerMetrics()
    async with AsyncExitStack() as stack:
        leadership = await stack.enter_async_context(
            broker_kubernetes.open_leadership(settings, now)
        )
        opener = open_store or _store_opener(settings)
        broker = Broker(
            opener, now, _rules(settings), metrics, leadership.leadership, leadership.replica
        )
        audit_log = AuditLog(broker, settings.audit_retention)
        certificates = (
            CertificateManager(settings, broker, metrics) if settings.serves_http else None
        )
        stack.push_async_callback(broker.close)
        watchers: list[ControllerManager | ClusterNamespaces] = []
        controllers = None
        if settings.serves_objects:
            controllers = await stack.enter_async_context(
                broker_kubernetes.open_controllers(settings, broker, _terms(settings))
            )
            watchers.append(controllers)
        connection_metrics = ConnectionMetrics(
            metrics, audit_log, trust_proxies=settings.trust_proxies
        )
        listen, limits = partial(_listen, stack, connection_metrics), _server_limits(settings)
        # Probes first, so that the start can be observed.
        ports = await listen(_probe_listeners(settings, broker, metrics, limits, watchers))
        context = None
        if certificates is not None:
            context = _app_context(settings, broker, metrics, certificates, audit_log)
            stack.callback(context.grant_signer.close)
            ports |= await listen(_api_listeners(settings, context, certificates, limits))
            context.membership.enrol_port = ports.get("enrol", 0)
            context.membership.api_port = ports["api"]
        namespaces = await _open_cluster_namespaces(stack, settings, broker, context)
        watchers += filter(None, [namespaces])
        stack.callback(broker.streams.close_all)
        yield BrokerApp(
            broker, audit_log, metrics, ports, certificates, controllers, leadership, namespaces
        )


async def _open_cluster_namespaces(
    stack: AsyncExitStack, settings: BrokerSettings, broker: Broker, context: AppContext | None
) -> ClusterNamespaces | None:
    """Shares agent sessions and grant signing with the REST interface, if that is served."""
    if not settings.cluster_namespaces:
        return None
    sessions = (
        context.agent_sessions if context else AgentSessions(broker.clock, settings.agent_timeout)
    )
    signer = context.grant_signer if context else GrantSigner(_grant_keys(settings))
    stack.callback(signer.close)
    opened = broker_kubernetes.open_cluster_namespaces(
        settings, broker, _terms(settings), sessions, signer
    )
    return await stack.enter_async_context(opened)


def _terms(settings: BrokerSettings) -> RequestLimits:
    return RequestLimits(settings.default_duration, settings.max_duration, settings.max_wait)


def _store_opener(settings: BrokerSettings) -> OpenStore:
    """Validates the store URL now; opening it is retried by the writer.

    Only the first opening may create the store: one that has been open and is missing was lost.
    """
    url = broker_kubernetes.resolved_store_url(settings)
    factory.check_store_url(url)
    has_been_open = False

    def open_store() -> Store:
        nonlocal has_been_open
        namespace = settings.http_namespace
        opened = factory.open_store(url, namespace=namespace, may_create=not has_been_open)
        has_been_open = True
        return opened

    return open_store


def _rules(settings: BrokerSettings) -> BrokerRules:
    return BrokerRules(
        stale_after=settings.stale_after,
        retention=settings.retention,
        waiting=WaitLimits(settings.max_waiting, settings.max_waiting_per_requester),
        explain_others=ExplainOthers(settings.explain_others),
        lost_after=settings.lost_after,
    )


def _warn_about_file_modes(settings: BrokerSettings) -> None:
    """Warns about files that other users can read or replace; does not prevent the start."""
    complaints = list(factory.store_mode_problems(settings.store_url))
    if settings.serves_http:
        certificates = settings.certificate_directory
        complaints += [
            tls.key_mode_warning(certificates),
            kits_files.directory_mode_problem(certificates),
        ]
    if settings.ca_path:
        complaints.append(kits_files.directory_mode_problem(Path(settings.ca_path)))
    for complaint in filter(None, complaints):
        log.warning(complaint)


class _Listener(NamedTuple):
    name: str
    address: Address
    handler: server.RequestHandlerFunction
    limits: server.ServerLimits
    context: ssl.SSLContext | None = None


def _probe_listeners(
    settings: BrokerSettings,
    broker: Broker,
    metrics: BrokerMetrics,
    limits: server.ServerLimits,
    watchers: Sequence[ControllerManager | ClusterNamespaces],
) -> Iterator[_Listener]:
    """Listeners for probes and metrics. Watchers of objects may be added to `watchers` later."""

    def unready() -> str | None:
        problems = (broker.not_serving_reason, *(one.unready for one in watchers))
        return next(filter(None, problems), None)

    # They have few clients, and must respond when the REST interface is saturated.
    limits = limits._replace(connections=ConnectionLimits(connections=128))
    if (address := settings.health_probe_bind_address) is not None:
        probes = server.serve_probes(unready, lambda: broker.readiness_detail)
        yield _Listener("probes", address, probes, limits)
    if (address := settings.metrics_bind_address) is not None:
        scrape = app.serve_metrics(metrics, broker.clock)
        yield _Listener("metrics", address, scrape, limits)


def _api_listeners(
    settings: BrokerSettings,
    context: AppContext,
    certificates: CertificateManager,
    limits: server.ServerLimits,
) -> Iterator[_Listener]:
    """Listeners of the REST interface and, with a CA, of the enrolment interface."""
    if certificates.authority is not None:
        enrol = Address(settings.http_host, settings.enrol_port)
        timeout = min(context.read_timeout, enrolment.READ_TIMEOUT)
        handler = enrolment.make_enrolment_api(
            context.membership, context.metrics, context.audit_log, timeout
        )
        # A client that sends no body must not block others.
        restricted = limits._replace(
            read=min(limits.read, timedelta(seconds=enrolment.READ_TIMEOUT)),
            body=min(limits.body, enrolment.MAX_BODY_BYTES),
            connections=enrolment.ENROLMENT_CONNECTIONS,
            body_wait_is_busy=False,
        )
        yield _Listener("enrol", enrol, handler, restricted, certificates.enrolment_context)
    api, handler = (
        Address(settings.http_host, settings.http_port),
        app.make_api(app.HANDLERS, context),
    )
    batched = limits._replace(read_batching=_read_batching())
    yield _Listener("api", api, handler, batched, certificates.server_context)


async def _listen(
    stack: AsyncExitStack, connection_metrics: ConnectionMetrics, listeners: Iterable[_Listener]
) -> dict[str, int]:
    ports = {}
    for name, (host, port), handler, limits, context in listeners:
        observer = connection_metrics if context else None
        ports[name] = await stack.enter_async_context(
            server.serve_http(
                handler, host, port, limits, context, observer, connection_metrics.caller_key
            )
        )
        log.info("Listening", component=name, host=host, port=ports[name])
    return ports


def _read_batching() -> ReadBatching:
    """Batches the reads of advertisements, whose responses no agent waits for."""
    (publish,) = (route for route in ROUTES if route.name == "publish")
    return ReadBatching(
        f"{publish.method} {publish.path} ".encode(),
        CoalescingTimer(READ_BATCH_SECONDS, READ_BATCH_RATE),
    )


def _app_context(
    settings: BrokerSettings,
    broker: Broker,
    metrics: BrokerMetrics,
    certificates: CertificateManager,
    audit_log: AuditLog,
) -> AppContext:
    policy = JoinPolicy(_patterns(settings.allow_join), _patterns(settings.auto_approve))
    return AppContext(
        broker=broker,
        metrics=metrics,
        terms=_terms(settings),
        authenticator=certificates.authenticator,
        rate_limiter=RateLimiter(settings.rate_limit, settings.rate_burst, time.monotonic),
        membership=Membership(broker, certificates.authority, policy),
        limits=LimitService(broker),
        audit_log=audit_log,
        grant_signer=GrantSigner(_grant_keys(settings)),
        agent_sessions=AgentSessions(broker.clock, settings.agent_timeout),
        version=kubelend.__version__,
        read_timeout=settings.read_timeout.total_seconds(),
    )


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _grant_keys(settings: BrokerSettings) -> GrantKeys:
    """Opens the key file, by default next to the store. Without a file store the keys are in memory only."""
    beside = factory.path_beside(settings.store_url, "grants.key")
    path = Path(settings.grant_key) if settings.grant_key else beside
    return GrantKeys.create() if path is None else GrantKeys.load_or_create(path)


def _server_limits(settings: BrokerSettings) -> server.ServerLimits:
    return server.ServerLimits(
        handshake=settings.handshake_timeout,
        read=settings.read_timeout,
        idle=settings.idle_timeout,
        shutdown=settings.shutdown_timeout,
        body=settings.max_body_bytes,
        connections=_connection_limits(settings),
    )


def _connection_limits(settings: BrokerSettings) -> ConnectionLimits:
    """Returns the connection limits, reduced to what the limit of open files allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = connection_limit(settings.max_connections, files)
    if connections < settings.max_connections:
        log.warning(
            "Limit of open files is too low for --max-connections; raise it (ulimit -Hn)",
            connections=connections,
            requested=settings.max_connections,
        )
    return ConnectionLimits(
        connections, settings.max_connections_per_caller, settings.max_handshakes
    )


RESERVED_FILES = 1024
"""File descriptors reserved for the store, the other listeners and the log."""

DEFAULT_MAX_CONNECTIONS = 16384
"""Default maximum of connections: 1 GB of memory, if all of them are in a handshake."""

MAX_OPEN_FILES = 2**20
"""Requested where no limit is set; the Linux default of `fs.nr_open`, above which setrlimit fails."""


def raise_file_limit() -> None:
    """Raises the soft limit to the hard limit. The low default is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = file_limit_target(soft, hard)
    if target != soft:
        # The system may refuse the hard limit; the old limit stays then.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    log.debug("Raised limit of open files", limit=now, before=soft, hard=hard)


def file_limit_target(soft: int, hard: int) -> int:
    """Returns the soft limit to set (`ulimit -Sn`), given the current limits."""
    highest = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    return soft if soft == resource.RLIM_INFINITY else max(soft, highest)


def connection_limit(wanted: int, files: int) -> int:
    """Returns the maximum number of connections: `wanted` (0 for the default), capped by the open files."""
    if files == resource.RLIM_INFINITY:
        return wanted or DEFAULT_MAX_CONNECTIONS
    available = max(files - RESERVED_FILES, files // 2, 1)
    return min(wanted or DEFAULT_MAX_CONNECTIONS, available)
