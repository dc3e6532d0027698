"""The composition root of the broker process, and its limit of open files (RLIMIT_NOFILE)."""

from __future__ import annotations

import asyncio
import gc
import ssl
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
import uvloop

import kubelend
from kubelend.api import binding, enrolment, probes, routing
from kubelend.api.calls import Context
from kubelend.api.granting import Granting
from kubelend.api.limits import RateLimiter
from kubelend.api.visitors import Visitors
from kubelend.apps import descriptors, leading, objects, stopping
from kubelend.apps.flags import Address
from kubelend.apps.leading import Seat
from kubelend.apps.settings import BrokerSettings
from kubelend.apps.trust import Trust
from kubelend.broker.journal import Journal
from kubelend.broker.limiting import Limiting
from kubelend.broker.membership import Membership
from kubelend.broker.metrics import Metrics
from kubelend.broker.ports import Clock, OpenStore
from kubelend.broker.service import Broker, Rules
from kubelend.broker.speakers import Speakers
from kubelend.core.enrolment import Door
from kubelend.kits import clock, logs, modes, tasks
from kubelend.kits.rhythm import Rhythm
from kubelend.pki.grants import GrantKeys
from kubelend.stores import opening
from kubelend.transports import http_server, tls
from kubelend.transports.admission import Room
from kubelend.transports.http_server import Gathering
from kubelend.wire.conversion import Terms
from kubelend.wire.routes import ROUTES

if TYPE_CHECKING:
    from kubelend.controllers.mailboxes import Mailboxes
    from kubelend.controllers.office import Office

BEAT = 0.2
"""Seconds for which advertisements are batched. No agent waits for the response to its advertisement."""

log = structlog.get_logger("kubelend.broker")


def run(settings: BrokerSettings) -> None:
    """Serves until SIGINT or SIGTERM; raises if it cannot start or a root task fails."""
    logs.setup(settings.log_level, settings.log_format)
    _tune_interpreter()
    descriptors.raise_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))
    log.info("Stopped", exit_code=0)


def _tune_interpreter() -> None:
    """Tunes garbage collection and thread switching.

    Records contain no reference cycles, so there is little to collect. The store's thread needs the
    interpreter only briefly, but would wait 5 ms each time while the event loop is busy: a shorter switch
    interval halves the duration of a commit under load.
    """
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(0.0005)


async def serve(settings: BrokerSettings) -> None:
    """Runs the broker in the current event loop."""
    async with started(settings) as process:
        await tasks.run_all(process.roots() | {"signals": stopping.told()})


class Process(NamedTuple):
    """A broker whose listeners are open; `roots` returns the tasks to run."""

    broker: Broker
    journal: Journal
    metrics: Metrics
    ports: dict[str, int]
    """Ports by listener: probes, metrics, enrol, api."""
    trust: Trust | None = None
    """Set if the REST interface is served."""
    office: Office | None = None
    """Set if custom resources are served."""
    seat: Seat = Seat()
    mailboxes: Mailboxes | None = None
    """Set if agents with the kubernetes transport are served."""

    def roots(self) -> dict[str, Coroutine[object, object, None]]:
        # First, so that it stops last: the leader keeps its lease until everything else has stopped.
        roots = {name: task.run() for name, task in self.seat.tasks.items()}
        roots |= {"broker": self.broker.run(), "journal": self.journal.run()}
        if self.trust is not None:
            roots["certificates"] = self.trust.follow()
        if self.office is not None:
            roots["objects"] = self.office.run()
        if self.mailboxes is not None:
            roots["cluster namespaces"] = self.mailboxes.run()
        return roots


@asynccontextmanager
async def started(
    settings: BrokerSettings, *, open_store: OpenStore | None = None, now: Clock = clock.utc_now
) -> AsyncIterator[Process]:
    """Builds the broker and opens its listeners. At exit, calls in progress are finished."""
    _look_at_modes(settings)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        seat = await stack.enter_async_context(leading.seat(settings, now))
        opener = open_store or _opener(settings)
        broker = Broker(opener, now, _rules(settings), metrics, seat.leadership, seat.replica)
        journal = Journal(broker, settings.audit_retention)
        trust = Trust(settings, broker, metrics) if settings.serves_http else None
        stack.push_async_callback(broker.close)
        office = await _office(stack, settings, broker)
        visitors = Visitors(metrics, journal, trust_proxies=settings.trust_proxies)
        listen = partial(_listen, stack, limits=_limits(settings), visitors=visitors)
        seeing: list[Office | Mailboxes] = [] if office is None else [office]
        # Probes first, so that the start can be observed.
        ports = await listen(_watched(settings, broker, metrics, seeing))
        context = None
        if trust is not None:
            context = _context(settings, broker, metrics, trust, journal)
            stack.callback(context.granting.close)
            ports |= await listen(_served(settings, context, trust))
            context.membership.enrol_port = ports.get("enrol", 0)
            context.membership.api_port = ports["api"]
        mailboxes = await _mailboxes(stack, settings, broker, context)
        seeing += [] if mailboxes is None else [mailboxes]
        stack.callback(broker.feeds.close_all)
        yield Process(broker, journal, metrics, ports, trust, office, seat, mailboxes)


async def _office(stack: AsyncExitStack, settings: BrokerSettings, broker: Broker) -> Office | None:
    if not settings.serves_objects:
        return None
    return await stack.enter_async_context(objects.office(settings, broker, _terms(settings)))


async def _mailboxes(
    stack: AsyncExitStack, settings: BrokerSettings, broker: Broker, context: Context | None
) -> Mailboxes | None:
    """Shares agent sessions and grant signing with the REST interface, if that is served."""
    if not settings.cluster_namespaces:
        return None
    speakers = context.speakers if context else Speakers(broker.clock, settings.agent_timeout)
    granting = context.granting.grant if context else None
    attended = objects.mailboxes(settings, broker, _terms(settings), speakers, granting)
    return await stack.enter_async_context(attended)


def _terms(settings: BrokerSettings) -> Terms:
    return Terms(settings.default_duration, settings.max_duration, settings.max_wait)


def _opener(settings: BrokerSettings) -> OpenStore:
    """Validates the store URL now; opening it is retried by the writer."""
    store = objects.ledger(settings)
    opening.check(store)
    return partial(opening.open_store, store, namespace=settings.http_namespace)


def _rules(settings: BrokerSettings) -> Rules:
    return Rules(
        stale_after=settings.stale_after,
        retention=settings.retention,
        max_waiting=settings.max_waiting,
        lost_after=settings.lost_after,
    )


def _look_at_modes(settings: BrokerSettings) -> None:
    """Warns about files that other users can read or replace; does not prevent the start."""
    complaints = list(opening.exposures(settings.ledger))
    if settings.serves_http:
        certificates = settings.certificates
        complaints += [tls.exposed_key(certificates), modes.exposed_directory(certificates)]
    if settings.ca_path:
        complaints.append(modes.exposed_directory(Path(settings.ca_path)))
    for complaint in filter(None, complaints):
        log.warning(complaint)


class _Listener(NamedTuple):
    name: str
    address: Address
    handler: http_server.Handler
    context: ssl.SSLContext | None = None


def _watched(
    settings: BrokerSettings,
    broker: Broker,
    metrics: Metrics,
    seeing: Sequence[Office | Mailboxes],
) -> Iterator[_Listener]:
    """Listeners for probes and metrics. Watchers of objects may be added to `seeing` later."""

    def unready() -> str | None:
        problems = (broker.silent_because, *(one.unready for one in seeing))
        return next(filter(None, problems), None)

    if settings.health_probe_bind_address is not None:
        yield _Listener("probes", settings.health_probe_bind_address, probes.health(unready))
    if settings.metrics_bind_address is not None:
        scrape = probes.metrics(metrics, broker.clock)
        yield _Listener("metrics", settings.metrics_bind_address, scrape)


def _served(settings: BrokerSettings, context: Context, trust: Trust) -> Iterator[_Listener]:
    """Listeners of the REST interface and, with a CA, of the enrolment interface."""
    if trust.authority is not None:
        enrol = Address(settings.http_host, settings.enrol_port)
        patience = min(context.read_timeout, enrolment.PATIENCE)
        handler = enrolment.bind(context.membership, context.metrics, context.journal, patience)
        yield _Listener("enrol", enrol, handler, trust.enrolment)
    api = Address(settings.http_host, settings.http_port)
    yield _Listener("api", api, binding.bind(routing.HANDLERS, context), trust.server)


async def _listen(
    stack: AsyncExitStack,
    listeners: Iterable[_Listener],
    limits: http_server.Limits,
    visitors: Visitors,
) -> dict[str, int]:
    ports = {}
    for name, (host, port), handler, context in listeners:
        # The other listeners have few clients, and must respond when the REST interface is saturated.
        own = limits._replace(gathers=_gathering()) if name == "api" else limits._replace(room=_FEW)
        if name == "enrol":
            own = _for_strangers(limits)
        watch = visitors if context else None
        ports[name] = await stack.enter_async_context(
            http_server.listening(handler, host, port, own, context, watch, visitors.who)
        )
        log.info("Listening", component=name, host=host, port=ports[name])
    return ports


def _gathering() -> Gathering:
    """Batches the reads of advertisements, whose responses no agent waits for."""
    (publish,) = (route for route in ROUTES if route.name == "publish")
    return Gathering(f"{publish.method} {publish.path} ".encode(), Rhythm(BEAT))


_FEW = Room(connections=128)
"""Connection limits of the probe and metrics listeners."""


def _for_strangers(limits: http_server.Limits) -> http_server.Limits:
    """Limits of the enrolment listener: a client that sends no body must not block others."""
    return limits._replace(
        read=min(limits.read, timedelta(seconds=enrolment.PATIENCE)),
        body=min(limits.body, enrolment.MOST_BYTES),
        room=enrolment.ROOM,
        spares_bodies=False,
    )


def _context(
    settings: BrokerSettings, broker: Broker, metrics: Metrics, trust: Trust, journal: Journal
) -> Context:
    return Context(
        broker=broker,
        metrics=metrics,
        terms=_terms(settings),
        callers=trust.callers,
        limiter=RateLimiter(settings.rate_limit, settings.rate_burst, time.monotonic),
        membership=Membership(broker, trust.authority, _door(settings)),
        limiting=Limiting(broker),
        journal=journal,
        granting=Granting(_grant_keys(settings)),
        speakers=Speakers(broker.clock, settings.agent_timeout),
        version=kubelend.__version__,
        read_timeout=settings.read_timeout.total_seconds(),
    )


def _door(settings: BrokerSettings) -> Door:
    return Door(_patterns(settings.allow_join), _patterns(settings.auto_accept))


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _grant_keys(settings: BrokerSettings) -> GrantKeys:
    """Opens the key file, by default next to the store. Without a file store the keys are in memory only."""
    beside = opening.beside(settings.ledger, "grants.key")
    path = Path(settings.grant_key) if settings.grant_key else beside
    return GrantKeys.create() if path is None else GrantKeys.open(path)


def _limits(settings: BrokerSettings) -> http_server.Limits:
    return http_server.Limits(
        handshake=settings.handshake_timeout,
        read=settings.read_timeout,
        idle=settings.idle_timeout,
        shutdown=settings.shutdown_timeout,
        body=settings.max_body_bytes,
        room=_room(settings),
    )


def _room(settings: BrokerSettings) -> Room:
    """Returns the connection limits, reduced to what the limit of open files allows."""
    connections = descriptors.connections(settings.max_connections, descriptors.limits().soft)
    if connections < settings.max_connections:
        log.warning(
            "Limit of open files is too low for --max-connections; raise it (ulimit -Hn)",
            connections=connections,
            requested=settings.max_connections,
        )
    return Room(connections, settings.max_connections_per_caller, settings.max_handshakes)
