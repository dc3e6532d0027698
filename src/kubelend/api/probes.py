"""What answers without TLS, on addresses of their own: probes for the kubelet, metrics for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from kubelend.api import about
from kubelend.broker.metrics import CONTENT_TYPE, Metrics
from kubelend.broker.ports import Clock
from kubelend.broker.service import Broker

Answer = Callable[[], Awaitable[web.Response]]
HttpHandler = Callable[[web.BaseRequest], Awaitable[web.Response]]


def health(broker: Broker) -> HttpHandler:
    """`/healthz` and `/readyz`."""

    async def healthz() -> web.Response:
        return web.Response(text="ok")

    async def readyz() -> web.Response:
        return about.readiness(broker.unready)

    return _pages({"/healthz": healthz, "/readyz": readyz})


def metrics(known: Metrics, clock: Clock) -> HttpHandler:
    """`/metrics`: copied here, written out in another thread, so that a large fleet delays no call."""

    async def scrape() -> web.Response:
        text = await asyncio.to_thread(known.render, known.snapshot(clock()))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    return _pages({"/metrics": scrape})


def _pages(pages: Mapping[str, Answer]) -> HttpHandler:
    async def answer(request: web.BaseRequest) -> web.Response:
        page = pages.get(request.path)
        if page is None:
            return web.Response(text=f"only {', '.join(pages)} here\n", status=404)
        if request.method not in {"GET", "HEAD"}:
            return web.Response(text="only GET here\n", status=405, headers={"Allow": "GET, HEAD"})
        return await page()

    return answer
