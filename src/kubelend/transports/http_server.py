"""HTTP servers on the listener, with a limit on every wait and size.

The listener limits the handshake, aiohttp the pause between two requests, and the handlers the time of a
body. The other two waits are limited by `_Connection`: for the rest of a header, and for a client that does
not read its response.
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

# Not `aiohttp.web`, the whole framework: it would cost the agent, which serves two pages, 1.5 MB.
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response, StreamResponse
from aiohttp.web_server import Server

from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.kits.repeats import Repeats
from kubelend.kits.rhythm import Rhythm
from kubelend.transports import accepting
from kubelend.transports.accepting import Acceptor, Security
from kubelend.transports.admission import Admission, Limit, Place, Room, Watch
from kubelend.wire import problems

GOODBYE = 30.0
"""Maximum seconds for a client to read the remaining data when its connection is closed."""

MOST_HELD = 2**16
"""Maximum buffered bytes of a batched request; a larger one is processed at once."""

log = structlog.get_logger("kubelend.http")


Handler = Callable[[BaseRequest], Awaitable[StreamResponse]]
Who = Callable[[Mapping[str, object]], Hashable]
"""Maps a verified certificate to the key by which connections are limited; None for no limit."""


class Gathering(NamedTuple):
    """Batching of frequent requests whose responses are not urgent: several are read at a time."""

    start: bytes
    """The first bytes of such a request."""
    rhythm: Rhythm


class Limits(NamedTuple):
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
    room: Room = Room()
    """Connection limits."""
    spares_bodies: bool = True
    """Whether a connection that waits for a body counts as busy; otherwise it may be closed as idle."""
    gathers: Gathering | None = None


class Unwatched:
    """Ignores all connection events."""

    def opened(self) -> None: ...

    def closed(self) -> None: ...

    def turned_away(self, limit: Limit, remote: str, caller: Hashable) -> None: ...

    def handshake_refused(self, remote: str, reason: str) -> None: ...


def by_subject(certificate: Mapping[str, object]) -> Hashable:
    """Returns the subject: connections are limited per subject."""
    subject = certificate.get("subject")
    return subject if isinstance(subject, tuple) else ()


@asynccontextmanager
async def listening(
    handler: Handler,
    host: str,
    port: int,
    limits: Limits,
    context: ssl.SSLContext | None = None,
    watch: Watch | None = None,
    who: Who = by_subject,
) -> AsyncIterator[int]:
    """Serves on an address and yields the port; finishes running requests at the end."""
    watch = watch or Unwatched()
    admission = Admission(limits.room, watch)
    connections = _Connections(handler, limits, admission, who)
    listeners = await _bind(host, port)
    security = Security(
        context, limits.handshake.total_seconds(), min(limits.idle.total_seconds(), GOODBYE)
    )
    acceptor = Acceptor(listeners, connections.of, admission, watch, security)
    try:
        yield listeners[0].getsockname()[1]
    finally:
        await acceptor.close()
        connections.pre_shutdown()
        # Not 0, which aiohttp takes for no limit.
        await connections.shutdown(max(limits.shutdown.total_seconds(), 0.001))


async def _bind(host: str, port: int) -> list[socket.socket]:
    try:
        return await accepting.open_listeners(host, port)
    except (OSError, UnicodeError) as problem:
        where = f"{host or '*'}:{port}"
        reason = getattr(problem, "strerror", "") or problem
        raise InvalidSettings(
            f"cannot listen on {where}: {reason}", hint=_remedy(problem)
        ) from problem


def _remedy(problem: OSError | UnicodeError) -> str:
    # UnicodeError: a label of the host name is empty or too long.
    if isinstance(problem, socket.gaierror | UnicodeError):
        return "cannot resolve the host: use an address of this machine, or a name that resolves to one"
    if problem.errno == errno.EADDRNOTAVAIL:
        return "use an address of this machine"
    return "use another port"


class _Connections(Server):
    """Creates a `_Connection` for each client."""

    def __init__(self, handler: Handler, limits: Limits, admission: Admission, who: Who) -> None:
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
        self.admission = admission
        self.who = who
        self.gathering = limits.gathers
        self.repeats = Repeats()
        self.spares_bodies = limits.spares_bodies
        self._body = limits.body

    def of(self, place: Place) -> _Connection:
        """Returns the protocol of a connection."""
        return _Connection(self, place, loop=self._loop, **self._kwargs)

    def pre_shutdown(self) -> None:
        """Processes buffered requests before shutdown."""
        for connection in self.connections:
            cast("_Connection", connection).read_held()
        super().pre_shutdown()

    def _request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> BaseRequest:
        if self.spares_bodies or payload.is_eof():
            self.admission.work(protocol.place)
        return _Request(
            message, payload, protocol, writer, task, self._loop, client_max_size=self._body
        )


class _Request(BaseRequest):
    async def _prepare_hook(self, response: StreamResponse) -> None:
        """Removes the Server header, which only helps attackers."""
        response.headers.pop("Server", None)


class _Connection(RequestHandler):
    """One client connection, with timeouts for headers and for reading responses."""

    __slots__ = (
        "_admission",
        "_answer_deadline",
        "_answer_timeout",
        "_gathering",
        "_header_deadline",
        "_header_timeout",
        "_held",
        "_repeats",
        "_spares_bodies",
        "_who",
        "place",
    )

    def __init__(self, connections: _Connections, place: Place, **options: Any) -> None:
        super().__init__(connections, **options)
        self.place = place
        self._admission = connections.admission
        self._who = connections.who
        self._gathering = connections.gathering
        self._held: bytearray | None = None
        """Buffered bytes of a batched request."""
        self._repeats = connections.repeats
        self._spares_bodies = connections.spares_bodies
        self._header_timeout = connections.header_timeout
        self._header_deadline: asyncio.TimerHandle | None = None
        self._answer_timeout = connections.answer_timeout
        self._answer_deadline: asyncio.TimerHandle | None = None

    @property
    def is_resting(self) -> bool:
        """Whether it waits for a request, whose header may have begun."""
        if self._held is not None:
            return False
        if self._waiter is not None:
            return not self._waiter.done()
        if self._spares_bodies:
            return False
        # It may also wait for the rest of a body that was answered already.
        request = self._current_request
        return request is None or not request.content.is_eof()

    @property
    def has_file(self) -> bool:
        return self.transport is not None

    def drop(self) -> None:
        # Not close(), which would wait for the client to read the buffered data.
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        certificate = transport.get_extra_info("peercert")
        caller = self._who(certificate) if certificate else self.place.remote
        if self._admission.enter(self.place, caller, self):
            super().connection_made(transport)
        else:
            cast("asyncio.Transport", transport).abort()

    def log_access(self, *_: object) -> None:
        """Called by aiohttp after each response. (There is no access log.)"""
        self._admission.rest(self.place)

    def data_received(self, data: bytes) -> None:
        gathering = self._gathering
        if self._held is not None:
            self._held += data
            if len(self._held) > MOST_HELD:
                self.read_held()
        elif gathering is not None and data.startswith(gathering.start) and self.is_resting:
            self._held = bytearray(data)
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
            gathering.rhythm.call(self.read_held)
        else:
            self._read(data)

    def read_held(self) -> None:
        """Processes buffered bytes, if the client is still connected."""
        held, self._held = self._held, None
        if held is not None and self.transport is not None:
            self._read(bytes(held))

    def _read(self, data: bytes) -> None:
        super().data_received(data)
        # No request is complete, and none is running whose body this could be.
        in_header = not self._messages and self._current_request is None
        if in_header and self._header_deadline is None:
            loop = asyncio.get_running_loop()
            self._header_deadline = loop.call_later(self._header_timeout, self.force_close)
        elif not in_header and self._header_deadline is not None:
            self._forget_deadline()

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
        suppressed = self._repeats.left_out(request.remote)
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
        loop = asyncio.get_running_loop()
        self._answer_deadline = loop.call_later(self._answer_timeout, self.drop)

    def resume_writing(self) -> None:
        self._forget_answer_deadline()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._admission.leave(self.place)
        self._forget_deadline()
        self._forget_answer_deadline()
        super().connection_lost(exc)

    def _forget_answer_deadline(self) -> None:
        if self._answer_deadline is not None:
            self._answer_deadline.cancel()
            self._answer_deadline = None

    def _forget_deadline(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
