"""HTTP servers on the listener, with a limit on every wait and size.

The listener limits the handshake, aiohttp the pause between two requests, and the handlers the time of a
body. The other two waits are limited by `_HttpConnection`: for the rest of a header, and for a client that
does not read its response.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import msgspec
import structlog
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response, StreamResponse
from aiohttp.web_server import Server

from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.kits.ratelimit import CoalescingTimer, LogThrottle
from kubelend.transports import listener
from kubelend.transports.listener import (
    Acceptor,
    ConnectionLimits,
    ConnectionObserver,
    ConnectionSlot,
    ConnectionTable,
    TlsSettings,
)
from kubelend.wire import problems

# Not `aiohttp.web`, the whole framework: it would cost the agent, which serves two pages, 1.5 MB.


MAX_SHUTDOWN_SECONDS = 30.0
"""Maximum seconds for a client to read the remaining data when its connection is closed."""

UNREAD_BODY_SECONDS = 1.0
"""Seconds for a client to read the response to a body that is not read to its end."""

MAX_BUFFERED_BYTES = 2**16
"""Maximum buffered bytes of a batched request, where a larger one is processed at once, and of responses,
beyond which the connection waits for its client to read them."""

MAX_UNDECRYPTED_BYTES = 2**14
"""Received bytes beyond which a connection is not read from: the size of a TLS record."""

log = structlog.get_logger("kubelend.http")


RequestHandlerFunction = Callable[[BaseRequest], Awaitable[StreamResponse]]
CallerKey = Callable[[Mapping[str, object]], Hashable]
"""Maps a verified certificate to the key by which connections are limited; None for no limit."""


class ReadBatching(NamedTuple):
    """Batching of frequent requests whose responses are not urgent: several are read at a time."""

    prefix: bytes
    """The first bytes of such a request."""
    timer: CoalescingTimer
    """Not used for the first request of a connection, which is read at once."""


class ServerLimits(NamedTuple):
    """Timeouts and sizes of a server."""

    handshake: timedelta = timedelta(seconds=10)
    """From accept to the end of the TLS handshake."""
    read: timedelta = timedelta(seconds=10)
    """From the first byte of a request to the end of its headers."""
    idle: timedelta = timedelta(seconds=75)
    """Between two requests of a connection, and for a response that the client does not read."""
    shutdown: timedelta = timedelta(seconds=20)
    """For running requests when the server closes."""
    body: int = 2**18
    """Maximum bytes of a request body."""
    connections: ConnectionLimits = ConnectionLimits()
    """Connection limits."""
    body_wait_is_busy: bool = True
    """Whether a connection that waits for a body counts as busy; otherwise it may be closed as idle."""
    read_batching: ReadBatching | None = None


def subject_key(certificate: Mapping[str, object]) -> Hashable:
    """Returns the subject: connections are limited per subject."""
    subject = certificate.get("subject")
    return subject if isinstance(subject, tuple) else ()


@asynccontextmanager
async def serve_http(
    handler: RequestHandlerFunction,
    host: str,
    port: int,
    limits: ServerLimits,
    context: ssl.SSLContext | None = None,
    observer: ConnectionObserver | None = None,
    caller_key: CallerKey = subject_key,
) -> AsyncIterator[int]:
    """Serves on an address and yields the port; finishes running requests at the end."""
    observer = observer or ConnectionObserver()
    table = ConnectionTable(limits.connections, observer)
    connections = _HttpServer(handler, limits, table, caller_key)
    listeners = await _open_sockets(host, port)
    shutdown_timeout = min(limits.idle.total_seconds(), MAX_SHUTDOWN_SECONDS)
    security = TlsSettings(context, limits.handshake.total_seconds(), shutdown_timeout)
    acceptor = Acceptor(listeners, connections.protocol_for, table, observer, security)
    try:
        yield listeners[0].getsockname()[1]
    finally:
        await acceptor.close()
        connections.pre_shutdown()
        # Not 0, which aiohttp takes for no limit.
        await connections.shutdown(max(limits.shutdown.total_seconds(), 0.001))


async def _open_sockets(host: str, port: int) -> list[socket.socket]:
    try:
        return await listener.open_listeners(host, port)
    except (OSError, UnicodeError) as error:
        where = f"{host or '*'}:{port}"
        reason = getattr(error, "strerror", "") or error
        hint = "use another port"
        # UnicodeError: a label of the host name is empty or too long.
        if isinstance(error, socket.gaierror | UnicodeError):
            hint = "cannot resolve the host: use an address of this machine, or a name that resolves to one"
        elif error.errno == errno.EADDRNOTAVAIL:
            hint = "use an address of this machine"
        raise InvalidSettings(f"cannot listen on {where}: {reason}", hint=hint) from error


class _HttpServer(Server):
    """Creates an `_HttpConnection` for each client."""

    def __init__(
        self,
        handler: RequestHandlerFunction,
        limits: ServerLimits,
        table: ConnectionTable,
        caller_key: CallerKey,
    ) -> None:
        super().__init__(
            handler,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.idle.total_seconds(),
            lingering_time=limits.read.total_seconds(),
        )
        self.header_timeout = limits.read.total_seconds()
        self.write_timeout = limits.idle.total_seconds()
        self.table = table
        self.caller_key = caller_key
        self.read_batching = limits.read_batching
        self.throttle = LogThrottle()
        self.body_wait_is_busy = limits.body_wait_is_busy
        self._body = limits.body

    def protocol_for(self, slot: ConnectionSlot) -> _HttpConnection:
        return _HttpConnection(self, slot, loop=self._loop, **self._kwargs)

    def pre_shutdown(self) -> None:
        """Processes buffered requests before shutdown."""
        for connection in self.connections:
            cast("_HttpConnection", connection).process_buffered()
        super().pre_shutdown()

    def _request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> BaseRequest:
        if self.body_wait_is_busy or payload.is_eof():
            self.table.mark_busy(protocol.slot)
        return _Request(
            message, payload, protocol, writer, task, self._loop, client_max_size=self._body
        )


class _Request(BaseRequest):
    async def _prepare_hook(self, response: StreamResponse) -> None:
        """Removes the Server header, which only helps attackers."""
        response.headers.pop("Server", None)


class _HttpConnection(RequestHandler):
    """One client connection, with timeouts for headers and for reading responses."""

    __slots__ = (
        "_buffered",
        "_drop_deadline",
        "_has_answered",
        "_header_deadline",
        "_server",
        "_write_deadline",
        "slot",
    )

    def __init__(self, server: _HttpServer, slot: ConnectionSlot, **options: Any) -> None:
        super().__init__(server, **options)
        self.slot = slot
        self._server = server
        self._buffered: bytearray | None = None
        """Buffered bytes of a batched request."""
        self._has_answered = False
        self._header_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._drop_deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, whose header may have begun."""
        if self._buffered is not None:
            return False
        if self._waiter is not None:
            return not self._waiter.done()
        if self._server.body_wait_is_busy:
            return False
        # It may also wait for the rest of a body that was answered already.
        request = self._current_request
        return request is None or not request.content.is_eof()

    def drop(self) -> None:
        # Not close(), which would wait for the client to read the buffered data.
        if self.transport is not None:
            self.transport.abort()

    async def finish_response(
        self, request: BaseRequest, resp: StreamResponse, start_time: float | None
    ) -> tuple[StreamResponse, bool]:
        """Sends a response; while the client does not read it, the next request of the connection waits.

        Meanwhile aiohttp stops reading, so that a client which pipelines and never reads costs its buffers.
        """
        sent = await super().finish_response(request, resp, start_time)
        if self._paused:
            await self._drain_helper()
        return sent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        certificate = transport.get_extra_info("peercert")
        caller = self._server.caller_key(certificate) if certificate else self.slot.remote
        opened = cast("asyncio.Transport", transport)
        if self._server.table.authenticated(self.slot, caller, self):
            self._limit_buffers(opened)
            super().connection_made(transport)
        else:
            opened.abort()

    def _limit_buffers(self, transport: asyncio.Transport) -> None:
        """Limits what is kept of a slow or greedy client; TLS has a read buffer of its own."""
        transport.set_write_buffer_limits(MAX_BUFFERED_BYTES)
        if hasattr(transport, "set_read_buffer_limits"):
            transport.set_read_buffer_limits(MAX_UNDECRYPTED_BYTES)

    def log_access(self, request: BaseRequest, response: StreamResponse, _: float | None) -> None:
        """Called by aiohttp after each response. (There is no access log.)"""
        self._has_answered = True
        self._server.table.mark_idle(self.slot)
        if not response.keep_alive and not request.content.is_eof() and self.transport is not None:
            # The rest of the body is not read. The client gets a moment to read the response, which a
            # connection that is closed with unread data may take with it.
            self._lingering_time = 0.0
            self.transport.pause_reading()
            self._drop_deadline = self._loop.call_later(UNREAD_BODY_SECONDS, self.drop)

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Logs a failure, unless it is of a body that was answered already and is only read to its end."""
        if not isinstance(options.get("exc_info"), RequestPayloadError):
            super().log_exception(*args, **options)

    def data_received(self, data: bytes) -> None:
        batching = self._server.read_batching
        if self._buffered is not None:
            self._buffered += data
            if len(self._buffered) > MAX_BUFFERED_BYTES:
                self.process_buffered()
        elif batching is not None and self._is_batched(data, batching):
            self._buffered = bytearray(data)
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
            batching.timer.schedule(self.process_buffered)
        else:
            self._process(data)

    def _is_batched(self, data: bytes, batching: ReadBatching) -> bool:
        return self._has_answered and data.startswith(batching.prefix) and self.is_idle

    def process_buffered(self) -> None:
        """Processes buffered bytes, if the client is still connected."""
        held, self._buffered = self._buffered, None
        if held is not None and self.transport is not None:
            self._process(bytes(held))

    def _process(self, data: bytes) -> None:
        super().data_received(data)
        # No request is complete, and none is running whose body this could be.
        in_header = not self._messages and self._current_request is None
        if in_header and self._header_deadline is None:
            timeout = self._server.header_timeout
            self._header_deadline = self._loop.call_later(timeout, self.force_close)
        elif not in_header and self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        transport = self.transport
        await super().shutdown(timeout)
        if self._drop_deadline is not None and transport is not None:
            transport.abort()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """Responds to malformed HTTP with a problem and one log line, where aiohttp logs a traceback."""
        if status != HTTPStatus.BAD_REQUEST:
            return super().handle_error(request, status, exc, message)
        problem = InvalidInput(f"malformed HTTP request: {(message or '').partition(chr(10))[0]}")
        suppressed = self._server.throttle.suppressed(request.remote)
        if suppressed is not None:
            log.warning(
                "Request rejected",
                remote=request.remote,
                code=problem.code,
                error=problem.message,
                suppressed=suppressed,
            )
        response = Response(
            body=msgspec.json.encode(problems.to_problem(problem)),
            status=status,
            headers={"Content-Type": problems.CONTENT_TYPE},
        )
        response.force_close()
        return response

    def pause_writing(self) -> None:
        """Starts the timeout: buffers are full because the client does not read."""
        super().pause_writing()
        self._write_deadline = self._loop.call_later(self._server.write_timeout, self.drop)

    def resume_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.table.remove(self.slot)
        for deadline in (self._header_deadline, self._write_deadline, self._drop_deadline):
            if deadline is not None:
                deadline.cancel()
        super().connection_lost(exc)


PageHandler = Callable[[], Awaitable[Response]]
HttpHandler = Callable[[BaseRequest], Awaitable[Response]]


def serve_pages(pages: Mapping[str, PageHandler]) -> HttpHandler:
    """Returns a handler of these paths; 404 for all others."""

    async def answer(request: BaseRequest) -> Response:
        page = pages.get(request.path)
        if page is None:
            return Response(text=f"not found; available: {', '.join(pages)}\n", status=404)
        if request.method not in {"GET", "HEAD"}:
            return Response(
                text="method not allowed; use GET\n", status=405, headers={"Allow": "GET, HEAD"}
            )
        return await page()

    return answer


def serve_probes(
    unready: Callable[[], str | None], detail: Callable[[], str] = lambda: ""
) -> HttpHandler:
    """Serves `/healthz` and `/readyz`; `unready` returns why the process is not ready, or None."""

    async def healthz() -> Response:
        return Response(text="ok")

    async def readyz() -> Response:
        return readiness_response(unready(), detail())

    return serve_pages({"/healthz": healthz, "/readyz": readyz})


def readiness_response(unready: str | None, detail: str) -> Response:
    """Returns the response of a readiness probe: `ok` and any detail, or 503 with the reason."""
    if not unready:
        return Response(text=f"ok: {detail}" if detail else "ok")
    return Response(text=f"not ready: {unready}", status=HTTPStatus.SERVICE_UNAVAILABLE)
