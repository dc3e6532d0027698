"""The broker process: everything it is made of, put together here and nowhere else."""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NamedTuple

import structlog
import uvloop

import kubelend
from kubelend.api import binding, probes, routing
from kubelend.api.callers import Callers
from kubelend.api.calls import Context
from kubelend.api.limits import RateLimiter
from kubelend.apps.flags import Address
from kubelend.apps.settings import BrokerSettings
from kubelend.broker.metrics import HANDSHAKE, Metrics
from kubelend.broker.ports import Clock, OpenStore
from kubelend.broker.service import Broker, Rules
from kubelend.core.errors import InvalidSettings
from kubelend.kits import clock, logs, tasks
from kubelend.kits.rhythm import Rhythm
from kubelend.stores import opening
from kubelend.transports import http_server, tls
from kubelend.wire.conversion import Terms

BEAT = 0.2
"""Seconds within which advertisements are taken in together: no cluster waits for the answer."""

log = structlog.get_logger("kubelend.broker")


def run(settings: BrokerSettings) -> None:
    """Serve until told to stop (SIGINT, SIGTERM); raises if it cannot start or cannot go on."""
    logs.setup(settings.log_level, settings.log_format)
    _tune_interpreter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))


def _tune_interpreter() -> None:
    """Records hold no cycles, so what is left to collect is little and can wait.

    The store's thread needs the interpreter for moments only, but would wait 5 ms for each of them
    while the event loop is busy: a shorter switch interval halves the time of a commit under load.
    """
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(0.0005)


async def serve(settings: BrokerSettings) -> None:
    """The same inside an event loop."""
    async with started(settings) as process:
        await tasks.run_all(process.roots() | {"signals": _told_to_stop()})


class Process(NamedTuple):
    """A broker that listens, and does all else once its root tasks run."""

    broker: Broker
    metrics: Metrics
    ports: dict[str, int]
    """Where it listens, by what for: probes, metrics, api."""
    follow_certificates: Callable[[], Coroutine[object, object, None]]

    def roots(self) -> dict[str, Coroutine[object, object, None]]:
        return {"broker": self.broker.run(), "certificates": self.follow_certificates()}


@asynccontextmanager
async def started(
    settings: BrokerSettings, *, open_store: OpenStore | None = None, now: Clock = clock.utc_now
) -> AsyncIterator[Process]:
    """Everything put together and listening. At the end, calls that have begun are finished."""
    metrics = Metrics()
    broker = Broker(open_store or _opener(settings), now, _rules(settings), metrics)
    certificates = _certificates(settings, metrics)
    callers = Callers(settings.http_cert_path, now, trust_proxies=settings.trust_proxies)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(broker.close)
        listeners = _listeners(settings, _context(settings, broker, metrics, callers), certificates)
        ports = await _listen(stack, listeners, _limits(settings))
        stack.callback(broker.feeds.close_all)
        follow = partial(_follow_certificates, settings, certificates, callers, metrics)
        yield Process(broker, metrics, ports, follow)


def _opener(settings: BrokerSettings) -> OpenStore:
    """A store that cannot be opened now is tried again; one that no text like this names is not."""
    opening.check(settings.store)
    return partial(opening.open_store, settings.store)


def _rules(settings: BrokerSettings) -> Rules:
    return Rules(
        stale_after=settings.stale_after,
        retention=settings.retention,
        max_waiting=settings.max_waiting,
    )


def _certificates(settings: BrokerSettings, metrics: Metrics) -> tls.ReloadingServerContext:
    warning = tls.exposed_key(settings.http_cert_path)
    if warning:
        log.warning(warning)

    def refused(reason: str) -> None:
        metrics.refused(HANDSHAKE, "HandshakeRefused")
        log.warning("refused", route=HANDSHAKE, code="HandshakeRefused", problem=reason)

    return tls.ReloadingServerContext(settings.http_cert_path, report=_keeps_old, refused=refused)


class _Listener(NamedTuple):
    what: str
    address: Address
    handler: http_server.Handler
    context: ssl.SSLContext | None = None


def _listeners(
    settings: BrokerSettings, context: Context, certificates: tls.ReloadingServerContext
) -> Iterator[_Listener]:
    """Probes first: whoever watches the start should see it."""
    broker, metrics = context.broker, context.metrics
    if settings.health_probe_bind_address is not None:
        yield _Listener("probes", settings.health_probe_bind_address, probes.health(broker))
    if settings.metrics_bind_address is not None:
        scrape = probes.metrics(metrics, broker.clock)
        yield _Listener("metrics", settings.metrics_bind_address, scrape)
    api = Address(settings.http_host, settings.http_port)
    yield _Listener("api", api, binding.bind(routing.HANDLERS, context), certificates.context)


async def _listen(
    stack: AsyncExitStack, listeners: Iterable[_Listener], limits: http_server.Limits
) -> dict[str, int]:
    ports = {}
    for what, (host, port), handler, context in listeners:
        ports[what] = await stack.enter_async_context(
            http_server.listening(handler, host, port, limits, context)
        )
        log.info("listening", what=what, host=host, port=ports[what])
    return ports


def _context(
    settings: BrokerSettings, broker: Broker, metrics: Metrics, callers: Callers
) -> Context:
    return Context(
        broker=broker,
        metrics=metrics,
        terms=Terms(settings.default_duration, settings.max_duration, settings.max_wait),
        callers=callers,
        limiter=RateLimiter(settings.rate_limit, settings.rate_burst, time.monotonic),
        version=kubelend.__version__,
        rhythm=Rhythm(BEAT),
        read_timeout=settings.read_timeout.total_seconds(),
    )


def _limits(settings: BrokerSettings) -> http_server.Limits:
    return http_server.Limits(
        handshake=settings.handshake_timeout,
        read=settings.read_timeout,
        idle=settings.idle_timeout,
        shutdown=settings.shutdown_timeout,
        body=settings.max_body_bytes,
    )


async def _follow_certificates(
    settings: BrokerSettings,
    certificates: tls.ReloadingServerContext,
    callers: Callers,
    metrics: Metrics,
) -> None:
    """Take up changed files: new connections see the new certificate, open ones go on."""
    interval = settings.certificate_check_interval.total_seconds()
    metrics.certificate("server", tls.expires_at(settings.http_cert_path))
    while True:
        await asyncio.sleep(interval)
        if certificates.refresh():
            log.info("certificates reloaded", path=str(settings.http_cert_path))
            try:
                callers.refresh()
                metrics.certificate("server", tls.expires_at(settings.http_cert_path))
            except InvalidSettings as problem:  # they change again, and so are read again
                _keeps_old(problem)


def _keeps_old(problem: InvalidSettings) -> None:
    log.error("certificates not reloaded, the old ones stay in use", problem=str(problem))


async def _told_to_stop() -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await told.wait()
    log.info("stopping")
