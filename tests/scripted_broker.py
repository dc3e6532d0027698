"""A broker that answers as a test says, over real mutual TLS on loopback: for tests of the client.

async with ScriptedBroker(certificates.server()) as broker:
    broker.responses += [problem(NotReady("starting")), body(bodies.Version("1"))]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from aiohttp import web

from kubelend.core.errors import KubelendError
from kubelend.transports import tls
from kubelend.wire import problems

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OVER = web.AppKey("over", asyncio.Event)
"""Set at the end, so that no handler outlives its test."""


class Seen(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    serial: int = 0
    """Of the certificate that the caller showed."""


class ScriptedBroker:
    """Gives its `responses` in turn, the last of them from then on, and records the requests."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        self.responses: list[Answer] = []
        self.seen: list[Seen] = []
        self.connections: set[int] = set()
        self.port = 0
        self._host = host
        self._context = tls.server_context(directory)
        self._over = asyncio.Event()
        app = web.Application()
        app[_OVER] = self._over
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)

    @property
    def url(self) -> str:
        name = "localhost" if self._host == "127.0.0.1" else self._host
        return f"https://{name}:{self.port}"

    @property
    def open_connections(self) -> int:
        """How many there are now; `connections` are all that there were."""
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0, ssl_context=self._context).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(
            Seen(
                request.method,
                request.raw_path.partition("?")[0],
                dict(request.query),
                dict(request.headers),
                await request.read(),
                _serial(request),
            )
        )
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername")[1])
        answer = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        return await answer(request)


def _serial(request: web.Request) -> int:
    # Gone if the caller hung up in the meantime.
    peercert = request.transport and request.transport.get_extra_info("peercert")
    return int(peercert["serialNumber"], 16) if peercert else 0


def body(content: object, status: int = 200) -> Answer:
    """A JSON body."""
    return raw(msgspec.json.encode(content), status)


def raw(content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """Any bytes."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=content, status=status, headers=headers)

    return answer


def problem(error: KubelendError, headers: dict[str, str] | None = None) -> Answer:
    """An error, as the real broker sends it."""
    found = problems.to_problem(error)
    return raw(msgspec.json.encode(found), found.status, headers)


async def hang_up(request: web.Request) -> web.StreamResponse:
    """The connection ends before an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def say_nothing(request: web.Request) -> web.StreamResponse:
    """Longer than any client waits."""
    await request.app[_OVER].wait()
    return web.Response()


def events(content: bytes, *, stay: bool = False) -> Answer:
    """A stream that says this and ends, or stays open in silence."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(content)
        if stay:
            await request.app[_OVER].wait()
        return response

    return answer
