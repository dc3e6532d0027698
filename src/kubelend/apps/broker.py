"""The broker process: everything it is made of, put together here and nowhere else."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from functools import partial

import structlog
import uvloop

import kubelend
from kubelend.api import probes, routing
from kubelend.api.calls import Context
from kubelend.api.limits import RateLimiter
from kubelend.apps.settings import BrokerSettings
from kubelend.broker.metrics import Metrics
from kubelend.broker.service import Broker, Rules
from kubelend.core.errors import InvalidSettings
from kubelend.kits import clock, logs, tasks
from kubelend.pki import identities
from kubelend.stores import opening
from kubelend.transports import http_server, tls
from kubelend.wire.conversion import Terms

log = structlog.get_logger("kubelend.broker")


def run(settings: BrokerSettings) -> None:
    """Serve until told to stop (SIGINT, SIGTERM); raises if it cannot start or cannot go on."""
    logs.setup(settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))


async def serve(settings: BrokerSettings) -> None:
    """The same inside an event loop."""
    metrics = Metrics()
    broker = Broker(
        partial(opening.open_store, settings.store), clock.utc_now, _rules(settings), metrics
    )
    certificates = _certificates(settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(broker.close)
        await _listen(stack, settings, broker, metrics, certificates)
        stack.callback(broker.feeds.close_all)
        await tasks.run_all(
            {
                "broker": broker.run(),
                "certificates": _watch_certificates(settings, certificates, metrics),
                "signals": _told_to_stop(),
            }
        )


def _rules(settings: BrokerSettings) -> Rules:
    return Rules(
        stale_after=settings.stale_after,
        retention=settings.retention,
        max_waiting=settings.max_waiting,
    )


def _certificates(settings: BrokerSettings) -> tls.ReloadingServerContext:
    warning = tls.exposed_key(settings.http_cert_path)
    if warning:
        log.warning(warning)
    return tls.ReloadingServerContext(settings.http_cert_path, report=_keeps_old)


async def _listen(
    stack: AsyncExitStack,
    settings: BrokerSettings,
    broker: Broker,
    metrics: Metrics,
    certificates: tls.ReloadingServerContext,
) -> None:
    """Probes first: whoever watches the start should see it."""
    timeouts = _timeouts(settings)
    plain = {
        "probes": (settings.health_probe_bind_address, probes.health(broker)),
        "metrics": (settings.metrics_bind_address, probes.metrics(metrics, broker.clock)),
    }
    for name, (address, app) in plain.items():
        if address is not None:
            port = await stack.enter_async_context(
                http_server.listening(app, address.host, address.port, timeouts)
            )
            log.info("listening", what=name, host=address.host, port=port)
    app = routing.application(_context(settings, broker, metrics), settings.max_body_bytes)
    port = await stack.enter_async_context(
        http_server.listening(
            app, settings.http_host, settings.http_port, timeouts, certificates.context
        )
    )
    log.info("listening", what="api", host=settings.http_host, port=port)


def _context(settings: BrokerSettings, broker: Broker, metrics: Metrics) -> Context:
    return Context(
        broker=broker,
        metrics=metrics,
        terms=Terms(settings.default_duration, settings.max_duration, settings.max_wait),
        limiter=RateLimiter(settings.rate_limit, settings.rate_burst, time.monotonic),
        version=kubelend.__version__,
        read_timeout=settings.read_timeout.total_seconds(),
        broker_names=identities.own_names(settings.http_cert_path),
    )


def _timeouts(settings: BrokerSettings) -> http_server.Timeouts:
    return http_server.Timeouts(
        handshake=settings.handshake_timeout,
        read=settings.read_timeout,
        idle=settings.idle_timeout,
        shutdown=settings.shutdown_timeout,
    )


async def _watch_certificates(
    settings: BrokerSettings, certificates: tls.ReloadingServerContext, metrics: Metrics
) -> None:
    """Take up changed files: new connections see the new certificate, open ones go on."""
    interval = settings.certificate_check_interval.total_seconds()
    metrics.certificate("server", tls.expires_at(settings.http_cert_path))
    while True:
        await asyncio.sleep(interval)
        if certificates.refresh():
            metrics.certificate("server", tls.expires_at(settings.http_cert_path))
            log.info("certificates reloaded", path=str(settings.http_cert_path))


def _keeps_old(problem: InvalidSettings) -> None:
    log.error("certificates not reloaded, the old ones stay in use", problem=str(problem))


async def _told_to_stop() -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await told.wait()
    log.info("stopping")
