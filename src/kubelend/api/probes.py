"""What answers without TLS, on addresses of their own: probes for the kubelet, metrics for Prometheus."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kubelend.api import about
from kubelend.broker.metrics import CONTENT_TYPE, Metrics
from kubelend.broker.ports import Clock
from kubelend.broker.service import Broker


def health(broker: Broker) -> web.Application:
    """`/healthz` and `/readyz`."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(_: web.Request) -> web.Response:
        return about.readiness(broker.unready)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    return app


def metrics(known: Metrics, clock: Clock) -> web.Application:
    """`/metrics`: copied here, written out in another thread, so that a large fleet delays no call."""

    async def scrape(_: web.Request) -> web.Response:
        text = await asyncio.to_thread(known.render, known.snapshot(clock()))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/metrics", scrape)])
    return app
