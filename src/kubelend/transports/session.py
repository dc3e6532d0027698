"""Sends requests to the broker: connection pools, timeouts, retries, event streams, and errors by class.

An error of the broker is raised as the class that the broker raised; no response at all is
`BrokerUnreachable`. Idempotent requests are retried while the error is retryable.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
import yarl

from kubelend.core.errors import (
    BrokerUnreachable,
    InvalidInput,
    KubelendError,
    LimitExceeded,
    UnexpectedResponse,
)
from kubelend.kits.backoff import Backoff
from kubelend.kits.connections import AbortingConnector
from kubelend.transports import errors, tls
from kubelend.transports.tls import FileReloader, ReportError
from kubelend.wire import bodies, problems, route, routes
from kubelend.wire.route import Route

Answered = TypeVar("Answered")

REQUEST_TIMEOUT = timedelta(seconds=30)
RELOAD_INTERVAL = timedelta(seconds=1)
DEFAULT_BACKOFF = Backoff()


class Session:
    """Sends the requests of one caller to one broker; open it with `async with`.

    It reloads the files of its directory: after a change, new requests use the new certificate and CAs, and
    running ones finish on their connections. `report` is called when changed files cannot be loaded.
    """

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        timeout: timedelta = REQUEST_TIMEOUT,
        backoff: Backoff = DEFAULT_BACKOFF,
        check_every: timedelta = RELOAD_INTERVAL,
        report: ReportError = lambda _: None,
        instance: str = "",
    ) -> None:
        """`check_every` and `report` configure the reload of the directory.

        `instance` is for agents: a name that changes with each start, see `route.AGENT_HEADER`.
        """
        self.backoff = backoff
        self._url = url.rstrip("/")
        self._endpoint = errors.BrokerEndpoint(self._url, directory)
        self._timeout = timeout
        self._check_every = check_every
        self._headers = {route.AGENT_HEADER: instance} if instance else {}
        self._connections = ConnectionPools(directory, check_every, report, self._endpoint.reset)

    async def __aenter__(self) -> Self:
        self._connections.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connections.close()

    async def call(
        self,
        kind: type[Answered],
        name: str,
        *names: str,
        query: Mapping[str, str] | None = None,
        body: bodies.Body | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        """Sends the request of a route, see `make_request`, and decodes the response."""
        response = await self.send(name, *names, query=query, body=body, headers=headers)
        return response.decode(kind)

    async def send(
        self,
        name: str,
        *names: str,
        query: Mapping[str, str] | None = None,
        body: bodies.Body | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Sends the request of a route, with retries if it is idempotent."""
        call = make_request(name, *names, query=query, body=body, headers=headers)
        delays = self.backoff.delays() if call.route.is_repeatable else iter(())
        while True:
            try:
                return await self._send_once(call)
            except KubelendError as error:
                # If the certificate was the cause, a new one may be available.
                if not (await self.refresh() and call.route.is_repeatable):
                    await self.wait_before_retry(error, next(delays, None))

    async def stream_chunks(
        self, call: PreparedRequest, read_timeout: timedelta
    ) -> AsyncGenerator[bytes, None]:
        """Yields chunks of one streaming response, until a new certificate is available.

        Raises if the broker closes the connection, or sends nothing for `read_timeout`.
        """
        timeout = aiohttp.ClientTimeout(
            connect=self._timeout.total_seconds(), sock_read=read_timeout.total_seconds()
        )
        with self._endpoint.translate_errors(read_timeout):
            async with (
                self._connections.lease() as own,
                self._request(own.session, call, timeout) as response,
            ):
                self._endpoint.has_answered = True
                if response.status not in call.route.responses:
                    raise response_error(response, await read_response(response))
                while await self._connections.is_latest(own):
                    yield await self._read_chunk(response.content)

    async def refresh(self) -> bool:
        """Checks the files of the directory now; True if they have changed and were loaded."""
        return await self._connections.refresh()

    async def wait_before_retry(
        self, error: KubelendError, delay: float | None, backoff: Backoff | None = None
    ) -> None:
        """Waits before the next attempt, or raises the error if there is none or it is not retryable."""
        longest = (backoff or self.backoff).longest.total_seconds()
        retry_after = error.retry_after if isinstance(error, LimitExceeded) else 0.0
        # An untrusted certificate is not retryable.
        is_distrust = isinstance(error.__cause__, aiohttp.ClientSSLError)
        if delay is None or not error.retryable or is_distrust or retry_after > longest:
            raise error
        await asyncio.sleep(max(delay, retry_after))

    async def _send_once(self, call: PreparedRequest) -> Response:
        timeout = aiohttp.ClientTimeout(total=self._timeout.total_seconds())
        with self._endpoint.translate_errors(self._timeout):
            async with (
                self._connections.lease() as own,
                self._request(own.session, call, timeout) as response,
            ):
                content = await read_response(response)
        self._endpoint.has_answered = True
        if response.status not in call.route.responses:
            raise response_error(response, content)
        return Response(response.status, content)

    def _request(
        self, session: aiohttp.ClientSession, call: PreparedRequest, timeout: aiohttp.ClientTimeout
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return session.request(
            call.route.method,
            yarl.URL(self._url + call.target, encoded=True),
            data=call.body,
            headers={**call.headers, **self._headers},
            timeout=timeout,
            allow_redirects=False,
        )

    async def _read_chunk(self, content: aiohttp.StreamReader) -> bytes:
        """Returns received bytes; empty when it is time to check the files."""
        limit = asyncio.timeout(self._check_every.total_seconds())
        try:
            async with limit:
                chunk = await content.readany()
        except TimeoutError:
            # aiohttp raises the same error for a dead connection.
            if not limit.expired():
                raise
            return b""
        if content.at_eof() and not chunk:
            raise BrokerUnreachable("the broker ended the stream")
        return chunk


MAX_RESPONSE_BYTES = 2**25
"""Maximum bytes of a response, 32 MiB. A page of 1000 reservations takes about 1 MiB."""


async def read_response(
    response: aiohttp.ClientResponse, maximum: int = MAX_RESPONSE_BYTES
) -> bytes:
    """Reads a response; one without end must not fill the memory of an agent."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > maximum:
            raise UnexpectedResponse(
                f"the response of {response.url.origin()} has more than {maximum} bytes",
                hint="check address and port, and ask for smaller pages",
            )
    return bytes(content)


def response_error(response: aiohttp.ClientResponse, content: bytes) -> KubelendError:
    """Returns the error of a response whose status its route does not define."""
    error = problems.error_from_response(response.status, content)
    retry_after = response.headers.get("Retry-After", "")
    # The broker never sends a date.
    if isinstance(error, LimitExceeded) and retry_after.isascii() and retry_after.isdigit():
        error.retry_after = float(retry_after)
    return error


MAX_EVENT_BYTES = 1 << 20
"""Maximum bytes of an unfinished event. An instruction takes about 1000."""


class ServerSentEvent(NamedTuple):
    """One event, as the HTML standard defines it."""

    data: str
    id: str = ""
    name: str = ""


class EventStreamParser:
    """Incremental parser of an event stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._id = ""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Returns the events that end in this chunk; comments (keep-alives) are skipped."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found = [event for line in lines if (event := self._parse_line(line)) is not None]
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise UnexpectedResponse("the stream of the broker contains an oversized event")
        return found

    def _parse_line(self, line: bytes) -> ServerSentEvent | None:
        text = line.decode("utf-8", "replace").removesuffix("\r")
        if not text:
            data, name, self._data, self._name = self._data, self._name, [], ""
            return ServerSentEvent("\n".join(data), self._id, name) if data else None
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "id":
            self._id = value
        elif field == "event":
            self._name = value
        return None


class PreparedRequest(NamedTuple):
    """One request."""

    route: Route
    target: str
    """Path and query, percent-encoded."""
    body: bytes | None
    headers: Mapping[str, str]


class Response(NamedTuple):
    """A response with a status that the route defines."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def decode(self, kind: type[Answered]) -> Answered:
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.MsgspecError as error:
            raise UnexpectedResponse(
                f"cannot decode the response of the broker: {error}"
            ) from error


def make_request(
    name: str,
    *names: str,
    query: Mapping[str, str] | None = None,
    body: bodies.Body | None = None,
    headers: Mapping[str, str] | None = None,
) -> PreparedRequest:
    """Builds the request of a route; `names` fill its path parameters; empty `query` values are omitted."""
    route = routes.ROUTES_BY_NAME[name]
    target = _request_target(route, names, query or {})
    accept = {"Accept": route.media_type, **(headers or {})}
    if body is None:
        return PreparedRequest(route, target, None, accept)
    accept["Content-Type"] = "application/json"
    return PreparedRequest(route, target, msgspec.json.encode(body), accept)


def page_query(limit: int, after: str = "") -> dict[str, str]:
    return {"limit": str(limit) if limit else "", "continue": after}


def _request_target(route: Route, names: tuple[str, ...], query: Mapping[str, str]) -> str:
    rest = iter(names)
    parts = [
        _path_segment(next(rest)) if part[:1] == "{" else part for part in route.path.split("/")
    ]
    wanted = {name: value for name, value in query.items() if value}
    return "/".join(parts) + (f"?{urlencode(wanted)}" if wanted else "")


def _path_segment(name: str) -> str:
    if not name:
        raise InvalidInput("empty name", hint="pass the name of a cluster or reservation")
    # Dot segments would be resolved, and `quote` does not encode them.
    return name.replace(".", "%2E") if name in {".", ".."} else quote(name, safe="")


KEEP_ALIVE = timedelta(seconds=60)
"""Keep-alive of idle connections: longer than the interval of advertisements, or each would cost a handshake;
shorter than the broker's idle timeout, or requests would hit closed connections."""


class ConnectionPools:
    """Connection pools of one client, one per certificate."""

    def __init__(
        self,
        directory: Path,
        check_every: timedelta,
        report: ReportError,
        on_reload: Callable[[], None],
    ) -> None:
        """`report` is called when files cannot be loaded, `on_reload` after a reload."""
        self._directory = directory
        self._check_every = check_every.total_seconds()
        self._report = report
        self._on_reload = on_reload
        self._checked_at = float("-inf")
        self._contexts: FileReloader[ssl.SSLContext] | None = None
        self._is_closed = False
        self._generations: list[ConnectionPool] = []
        """The latest is last; the others serve requests that have begun."""

    def open(self) -> None:
        """Loads the files; connects with the first request."""
        self._is_closed = False
        self._contexts = FileReloader(self._directory, tls.client_context, self._report)
        self._checked_at = asyncio.get_running_loop().time()
        self._generations = [ConnectionPool(self._contexts.current)]

    async def close(self) -> None:
        generations, self._generations = self._generations, []
        self._contexts = None
        self._is_closed = True
        for generation in generations:
            await generation.session.close()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[ConnectionPool]:
        """Borrows the latest connection pool for one request."""
        await self.check()
        if self._is_closed:
            # Closed while requests were running: not a usage error.
            raise BrokerUnreachable("the connection to the broker was closed on this side")
        if not self._generations:
            raise RuntimeError("open the client with `async with` first")
        generation = self._generations[-1]
        generation.calls += 1
        try:
            yield generation
        finally:
            generation.calls -= 1
            await self._close_old()

    async def is_latest(self, generation: ConnectionPool) -> bool:
        """Whether this is the latest pool; for streams, which hold a lease for long."""
        await self.check()
        return generation in self._generations[-1:]

    async def check(self) -> None:
        """Checks the files for changes, unless that was done recently."""
        if asyncio.get_running_loop().time() - self._checked_at >= self._check_every:
            await self.refresh()

    async def refresh(self) -> bool:
        """Checks the files now; True if they have changed and were loaded."""
        self._checked_at = asyncio.get_running_loop().time()
        if self._contexts is None or not self._contexts.refresh():
            return False
        self._generations.append(ConnectionPool(self._contexts.current))
        self._on_reload()
        await self._close_old()
        return True

    async def _close_old(self) -> None:
        over = [generation for generation in self._generations[:-1] if not generation.calls]
        # Removed before the first await, so that concurrent calls do not close them as well.
        self._generations = [each for each in self._generations if each not in over]
        for generation in over:
            await generation.session.close()


class ConnectionPool:
    """The connection pool of one certificate."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.session = aiohttp.ClientSession(
            connector=AbortingConnector(
                ssl=context, limit=0, keepalive_timeout=KEEP_ALIVE.total_seconds()
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.calls = 0
