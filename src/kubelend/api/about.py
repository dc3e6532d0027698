"""Health, readiness, version, grant keys and the OpenAPI document."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import pages
from kubelend.api.calls import JSON_HEADERS, RequestContext, json_response
from kubelend.wire import bodies, openapi


async def healthz(_: RequestContext) -> web.StreamResponse:
    return web.Response(text="ok")


async def readyz(call: RequestContext) -> web.StreamResponse:
    return pages.readiness_response(call.broker.not_serving_reason)


async def grant_keys(call: RequestContext) -> web.StreamResponse:
    return json_response(call.app.grant_signer.public)


async def version(call: RequestContext) -> web.StreamResponse:
    return json_response(bodies.Version(call.app.version))


async def openapi_document(call: RequestContext) -> web.StreamResponse:
    return web.Response(body=openapi.document_bytes(call.app.version), headers=JSON_HEADERS)
