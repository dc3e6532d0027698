"""Health and readiness probes, metrics, version and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from kubelend.api.request import JSON_HEADERS, RequestContext, json_response
from kubelend.broker.metrics import METRICS_CONTENT_TYPE, Metrics
from kubelend.broker.ports import Clock
from kubelend.transports import server
from kubelend.transports.server import HttpHandler
from kubelend.wire import bodies, openapi


def serve_probes(unready: Callable[[], str | None]) -> HttpHandler:
    """Serves `/healthz` and `/readyz`; `unready` returns why requests cannot be answered, or None."""

    async def healthz() -> web.Response:
        return web.Response(text="ok")

    async def readyz() -> web.Response:
        return server.readiness_response(unready())

    return server.serve_pages({"/healthz": healthz, "/readyz": readyz})


def serve_metrics(metrics: Metrics, clock: Clock) -> HttpHandler:
    """Serves `/metrics`, rendered in another thread, so that a large fleet does not delay requests."""

    async def scrape() -> web.Response:
        text = await asyncio.to_thread(metrics.render, metrics.snapshot(clock()))
        return web.Response(body=text, headers={"Content-Type": METRICS_CONTENT_TYPE})

    return server.serve_pages({"/metrics": scrape})


async def healthz(_: RequestContext) -> web.StreamResponse:
    return web.Response(text="ok")


async def readyz(call: RequestContext) -> web.StreamResponse:
    return server.readiness_response(call.broker.not_serving_reason)


async def grant_keys(call: RequestContext) -> web.StreamResponse:
    return json_response(call.app.grant_signer.public)


async def version(call: RequestContext) -> web.StreamResponse:
    return json_response(bodies.Version(call.app.version))


async def openapi_document(call: RequestContext) -> web.StreamResponse:
    return web.Response(body=openapi.document_bytes(call.app.version), headers=JSON_HEADERS)
