"""The REST application: every route of the wire bound to its handler."""

from __future__ import annotations

import re

from aiohttp import web

from kubelend.api import about, advertisements, clusters, instructions, reservations
from kubelend.api.binding import Handler, bind, fallback
from kubelend.api.calls import Context
from kubelend.wire.routes import ROUTES

HANDLERS: dict[str, Handler] = {
    "publish": advertisements.publish,
    "get_advertisement": advertisements.get_advertisement,
    "reserve": reservations.reserve,
    "list_reservations": reservations.list_reservations,
    "get_reservation": reservations.get_reservation,
    "release": reservations.release,
    "activate": reservations.activate,
    "renew": reservations.renew,
    "explain_reservation": reservations.explain_reservation,
    "explain": reservations.explain,
    "instructions": instructions.list_instructions,
    "stream": instructions.stream,
    "acknowledge": instructions.acknowledge,
    "refuse": instructions.refuse,
    "list_clusters": clusters.list_clusters,
    "get_cluster": clusters.get_cluster,
    "cordon": clusters.cordon,
    "uncordon": clusters.uncordon,
    "drain": clusters.drain,
    "remove_cluster": clusters.remove_cluster,
    "version": about.version,
    "openapi": about.description,
    "healthz": about.healthz,
    "readyz": about.readyz,
}


def application(context: Context, max_body: int) -> web.Application:
    """What the mutual-TLS listener serves."""
    app = web.Application(client_max_size=max_body)
    for route in ROUTES:
        handler = bind(route, HANDLERS[route.name], context)
        app.router.add_route(route.method, _pattern(route.path), handler)
    app.router.add_route("*", "/{path:.*}", fallback(app, context))
    return app


def _pattern(path: str) -> str:
    """With names of any characters: left to itself, the router takes none with braces."""
    return re.sub(r"\{(\w+)\}", r"{\1:[^/]+}", path)
