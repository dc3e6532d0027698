"""HTTP listeners: where the applications of `api` meet sockets, with a time limit on every wait.

Of the five waits for a client, TLS and aiohttp limit the handshake and the pause between two requests,
and the reader of a body limits that (`api.calls`). What is left are a header that began and does not end,
and an answer that is not taken: `_Connection` limits them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import structlog
from aiohttp import web

from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.wire import problems

BACKLOG = 1024
"""Connections that the kernel keeps for us: a whole fleet may come back at once."""


log = structlog.get_logger("kubelend.http")


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Limits(NamedTuple):
    """How long a listener waits for its clients, and how much it reads."""

    handshake: timedelta = timedelta(seconds=10)
    """From the connection to the end of the TLS handshake."""
    read: timedelta = timedelta(seconds=10)
    """From the first byte of a request to the end of its headers."""
    idle: timedelta = timedelta(seconds=75)
    """Between two requests of one connection, and for an answer that the client does not take."""
    shutdown: timedelta = timedelta(seconds=20)
    """For calls that have begun when the listener closes."""
    body: int = 2**18
    """Bytes of a request's body."""


@asynccontextmanager
async def listening(
    handler: Handler,
    host: str,
    port: int,
    limits: Limits,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve on an address; gives the port. At the end, calls that have begun are finished."""
    connections = _Connections(handler, limits)
    server = await _bind(connections, host, port, limits, context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        connections.pre_shutdown()
        # A moment at the least: aiohttp takes 0 for no limit at all.
        await connections.shutdown(max(limits.shutdown.total_seconds(), 0.001))


async def _bind(
    connections: _Connections,
    host: str,
    port: int,
    limits: Limits,
    context: ssl.SSLContext | None,
) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(
            connections,
            host or None,
            port,
            ssl=context,
            ssl_handshake_timeout=limits.handshake.total_seconds() if context else None,
            backlog=BACKLOG,
        )
    except OSError as problem:
        where = f"{host or '*'}:{port}"
        raise InvalidSettings(
            f"cannot listen on {where}: {problem.strerror or problem}", hint="choose another port"
        ) from problem


class _Connections(web.Server):
    """Makes a `_Connection` for each client."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        super().__init__(
            handler,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.idle.total_seconds(),
            lingering_time=limits.read.total_seconds(),
        )
        self.header_timeout = limits.read.total_seconds()
        self.answer_timeout = limits.idle.total_seconds()
        self._body = limits.body

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def _request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._loop, client_max_size=self._body
        )


class _Connection(web.RequestHandler):
    """One client; closed if a header takes too long to come, or an answer to go."""

    __slots__ = ("_answer_deadline", "_answer_timeout", "_header_deadline", "_header_timeout")

    def __init__(self, connections: _Connections, **options: Any) -> None:
        super().__init__(connections, **options)
        self._header_timeout = connections.header_timeout
        self._header_deadline: asyncio.TimerHandle | None = None
        self._answer_timeout = connections.answer_timeout
        self._answer_deadline: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Bytes came, no request is complete, and none is running whose body they could be.
        in_header = not self._messages and self._current_request is None
        if in_header and self._header_deadline is None:
            loop = asyncio.get_running_loop()
            self._header_deadline = loop.call_later(self._header_timeout, self.force_close)
        elif not in_header and self._header_deadline is not None:
            self._forget_deadline()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP is its sender's fault: a line and a problem, where aiohttp logs a traceback."""
        if status != HTTPStatus.BAD_REQUEST:
            return super().handle_error(request, status, exc, message)
        problem = InvalidInput(f"this is no HTTP: {(message or '').partition(chr(10))[0]}")
        log.warning("refused", remote=request.remote, code=problem.code, problem=problem.message)
        response = web.Response(
            body=msgspec.json.encode(problems.to_problem(problem)),
            status=status,
            headers={"Content-Type": problems.CONTENT_TYPE},
        )
        response.force_close()
        return response

    def pause_writing(self) -> None:
        """All buffers are full: the client does not read."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._answer_deadline = loop.call_later(self._answer_timeout, self._give_up)

    def resume_writing(self) -> None:
        self._forget_answer_deadline()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_deadline()
        self._forget_answer_deadline()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        # Not close(), which would wait for the client to take what is buffered.
        if self.transport is not None:
            self.transport.abort()

    def _forget_answer_deadline(self) -> None:
        if self._answer_deadline is not None:
            self._answer_deadline.cancel()
            self._answer_deadline = None

    def _forget_deadline(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
