"""A broker with the routes, bodies and refusals of the published system, and nothing more, over mutual TLS.

with published_broker.running(certificates.server()) as broker:
    agent_process.running(broker.url, ...)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from kubelend.core import durations
from kubelend.transports import tls
from waiting import PATIENCE

NAMED = ("capacity", "allocatable", "allocated", "available")


class PublishedBroker:
    """Locks what it is asked for at the first other cluster, without looking at amounts."""

    def __init__(self) -> None:
        self.advertisements: dict[str, dict[str, Any]] = {}
        self.reservations: dict[str, dict[str, Any]] = {}
        self.port = 0

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    async def advertise(self, request: web.Request) -> web.Response:
        body, caller = await request.json(), _caller(request)
        if not body.get("clusterName") or not all(body["resources"].get(name) for name in NAMED):
            return web.Response(text="Failed to create advertisement\n", status=500)
        self.advertisements[caller] = body
        held = [found for found in self.reservations.values() if _is_held_by(found, caller)]
        return web.json_response(
            {"advertisement": body} | ({"providerInstructions": held} if held else {})
        )

    async def reserve(self, request: web.Request) -> web.Response:
        body, caller = await request.json(), _caller(request)
        target = next(name for name in self.advertisements if name != caller)
        now = datetime.now(UTC).replace(microsecond=0)
        made = {
            "id": f"rsv-{caller}-{len(self.reservations)}",
            "requesterID": caller,
            "targetClusterID": target,
            "requestedResources": body["requestedResources"],
            "status": {
                "phase": "Reserved",
                "message": f"Resources locked in cluster {target}",
                "reservedAt": now.isoformat(),
                "expiresAt": (now + durations.parse_duration(body["duration"])).isoformat(),
            },
            "createdAt": now.isoformat(),
        }
        self.reservations[made["id"]] = made
        return web.json_response(made, status=201)

    async def instructions(self, request: web.Request) -> web.Response:
        caller = _caller(request)
        held = [found for found in self.reservations.values() if _is_held_by(found, caller)]
        return web.json_response(held or None)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_page_not_found])
        app.router.add_post("/api/v1/advertisements", self.advertise)
        app.router.add_post("/api/v1/reservations", self.reserve)
        app.router.add_get("/api/v1/instructions", self.instructions)
        app.router.add_get("/healthz", _healthz)
        return app


def _is_held_by(found: dict[str, Any], cluster: str) -> bool:
    return (found["targetClusterID"], found["status"]["phase"]) == (cluster, "Reserved")


def _caller(request: web.Request) -> str:
    assert request.transport is not None
    subject = request.transport.get_extra_info("peercert")["subject"]
    return str(dict(part[0] for part in subject)["commonName"])


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok")


@web.middleware
async def _page_not_found(request: web.Request, handler: Handler) -> web.StreamResponse:
    """As Go's own mux says it."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed:
        return web.Response(text="Method not allowed\n", status=405)
    except web.HTTPNotFound:
        return web.Response(text="404 page not found\n", status=404)


@contextlib.contextmanager
def running(directory: Path) -> Iterator[PublishedBroker]:
    """In a thread of its own, until the end of the block."""
    broker, is_started = PublishedBroker(), threading.Event()
    loop = asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(broker.app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.server_context(directory)).start()
        broker.port = runner.addresses[0][1]
        is_started.set()
        await is_over.wait()
        await runner.cleanup()

    def work() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=work)
    thread.start()
    assert is_started.wait(PATIENCE)
    try:
        yield broker
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(PATIENCE)
