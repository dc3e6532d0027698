"""Health, readiness, version, grant keys and the OpenAPI document."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import pages
from kubelend.api.calls import JSON, Call, json
from kubelend.wire import bodies, openapi


async def healthz(_: Call) -> web.StreamResponse:
    return web.Response(text="ok")


async def readyz(call: Call) -> web.StreamResponse:
    return pages.readiness(call.broker.silent_because)


async def grant_keys(call: Call) -> web.StreamResponse:
    return json(call.context.granting.public)


async def version(call: Call) -> web.StreamResponse:
    return json(bodies.Version(call.context.version))


async def description(call: Call) -> web.StreamResponse:
    return web.Response(body=openapi.text(call.context.version), headers=JSON)
