"""An API server that answers what a test tells it to, over a real socket with real TLS.

    async with scripted_api.running(certificates.server()) as server:
        server.answers.append(scripted_api.status(429, "Too many", retry_after=1))
        ... server.access() ...

For what a real one cannot be made to say at will. What it does by itself is tested on a real one, in
tests/kube.
"""

from __future__ import annotations

import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from kubelend.kube.config import DataOrFile, KubeConfig

Script = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = web.StreamResponse | Script


class Server:
    """Remembers what it was asked, and gives its answers in turn."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.answers: deque[Answer] = deque()
        self.asked: list[web.Request] = []
        self.connections: set[object] = set()
        self.callers: list[str] = []
        """The common name of the certificate that each call came with; empty without one."""
        self.port = 0

    def access(self, **changed: Any) -> KubeConfig:
        """To this server; anybody may call it."""
        settings: dict[str, Any] = {
            "server": f"https://127.0.0.1:{self.port}",
            "authorities": DataOrFile(path=self.directory / "ca.crt"),
        }
        return KubeConfig(**(settings | changed))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        await request.read()
        assert request.transport is not None
        self.connections.add(request.transport)
        peer = request.transport.get_extra_info("peercert") or {}
        names = dict(part[0] for part in peer.get("subject", ()))
        self.callers.append(names.get("commonName", ""))
        answer = self.answers.popleft()
        return await answer(request) if callable(answer) else answer


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Server]:
    """With the certificate of `directory`; it asks for one of the same authority, and does without."""
    server = Server(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    context.load_verify_locations(directory / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()


def one(name: str, version: str = "1", **data: str) -> dict[str, Any]:
    """A ConfigMap."""
    metadata = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    return {"metadata": metadata | {"resourceVersion": version}, "data": data}


def found(body: dict[str, Any]) -> web.Response:
    return web.json_response(body)


def page(*items: dict[str, Any], version: str = "10", following: str = "") -> web.Response:
    metadata = {"resourceVersion": version, "continue": following}
    return found({"metadata": metadata, "items": items})


def status(
    code: int, message: str = "no", *, reason: str = "", name: str = "", retry_after: int = 0
) -> web.Response:
    """As Kubernetes tells what went wrong."""
    details = {"name": name, "retryAfterSeconds": retry_after}
    body = {"kind": "Status", "message": message, "reason": reason, "details": details}
    headers = {"Retry-After": str(retry_after)} if retry_after else {}
    return web.json_response(body | {"code": code}, status=code, headers=headers)


def event(kind: str, body: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


def watch(*chunks: bytes, cut: bool = False) -> Script:
    """These bytes, and then its end; or no end, but a broken connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer
