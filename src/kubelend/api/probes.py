"""Health and readiness probes, metrics, version and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from kubelend.api import pages
from kubelend.api.pages import HttpHandler
from kubelend.broker.metrics import CONTENT_TYPE, Metrics
from kubelend.broker.ports import Clock


def health(unready: Callable[[], str | None]) -> HttpHandler:
    """Serves `/healthz` and `/readyz`; `unready` returns why requests cannot be answered, or None."""

    async def healthz() -> web.Response:
        return web.Response(text="ok")

    async def readyz() -> web.Response:
        return pages.readiness(unready())

    return pages.serve({"/healthz": healthz, "/readyz": readyz})


def metrics(known: Metrics, clock: Clock) -> HttpHandler:
    """Serves `/metrics`, rendered in another thread, so that a large fleet does not delay requests."""

    async def scrape() -> web.Response:
        text = await asyncio.to_thread(known.render, known.snapshot(clock()))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    return pages.serve({"/metrics": scrape})
