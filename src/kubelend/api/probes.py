"""Health and readiness probes, metrics, version and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from kubelend.api import pages
from kubelend.api.pages import HttpHandler
from kubelend.broker.metrics import METRICS_CONTENT_TYPE, Metrics
from kubelend.broker.ports import Clock


def serve_probes(unready: Callable[[], str | None]) -> HttpHandler:
    """Serves `/healthz` and `/readyz`; `unready` returns why requests cannot be answered, or None."""

    async def healthz() -> web.Response:
        return web.Response(text="ok")

    async def readyz() -> web.Response:
        return pages.readiness_response(unready())

    return pages.serve_pages({"/healthz": healthz, "/readyz": readyz})


def serve_metrics(metrics: Metrics, clock: Clock) -> HttpHandler:
    """Serves `/metrics`, rendered in another thread, so that a large fleet does not delay requests."""

    async def scrape() -> web.Response:
        text = await asyncio.to_thread(metrics.render, metrics.snapshot(clock()))
        return web.Response(body=text, headers={"Content-Type": METRICS_CONTENT_TYPE})

    return pages.serve_pages({"/metrics": scrape})
