"""HTTP transport to one API server: connections, timeouts, credentials and error mapping.

Requests that the server rejects with Retry-After are repeated here; all other retries are up to the caller,
who knows whether a retry is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import timedelta
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp
import msgspec
import yarl
from aiohttp.client import _RequestContextManager
from aiohttp.connector import AddrInfoType
from multidict import CIMultiDict

import kubelend
from kubelend.core import durations
from kubelend.core.errors import (
    KubelendError,
    LimitExceeded,
    Unauthenticated,
    Unavailable,
    UnexpectedResponse,
)
from kubelend.kits.backoff import Backoff
from kubelend.kits.connections import AbortingConnector
from kubelend.kube import codec
from kubelend.kube.auth import CredentialSource, RequestCredentials
from kubelend.kube.config import KubeConfig

Response = TypeVar("Response")

REQUEST_TIMEOUT: Final = timedelta(seconds=30)
IDLE_TIMEOUT: Final = timedelta(seconds=60)
"""Keep-alive of idle connections; an API server closes them after 90 seconds."""
REQUEST_BACKOFF: Final = Backoff(retries=5)
MAX_CONCURRENT_REQUESTS: Final = 64
"""Maximum concurrent requests. Watches are not counted, as they never end."""
MAX_EVENT_BYTES: Final = 1 << 23
"""Maximum size of a watch event. Objects have at most 1.5 MB in etcd, and somewhat more as JSON."""


class ApiRequest(msgspec.Struct, frozen=True):
    """One request, without credentials."""

    method: str
    path: str
    query: dict[str, str] = {}
    body: bytes | None = None
    content_type: str = "application/json"
    is_repeated: bool = True
    """Whether it is repeated after the server's Retry-After."""


class Transport:
    """Connections to one API server. Opened and closed by `kube.client.Client.open`."""

    def __init__(
        self,
        config: KubeConfig,
        timeout: timedelta,
        backoff: Backoff,
        max_concurrent: int = MAX_CONCURRENT_REQUESTS,
    ) -> None:
        self._credentials = CredentialSource(config)
        self._timeout = timeout
        self._backoff = backoff
        # Acquired before the timeout starts: a queued request does not wait for the server.
        self._request_slots = asyncio.Semaphore(max_concurrent)
        self._session = aiohttp.ClientSession(
            connector=AbortingConnector(
                limit=0,
                keepalive_timeout=IDLE_TIMEOUT.total_seconds(),
                socket_factory=_socket,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"kubelend/{kubelend.__version__}"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, call: ApiRequest) -> bytes:
        """Send a request and return the body of the response."""
        return await self._with_retries(call, self._send_once)

    async def lines(self, call: ApiRequest, limit: timedelta) -> AsyncGenerator[bytes, None]:
        """Yield the response line by line; the first line is empty and marks the start of the response.

        Ends when the server ends it, and with `Unavailable` if that takes longer than `limit`.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit.total_seconds()
        async with await self._with_retries(call, self._open) as response:
            yield b""
            rest = bytearray()
            while True:
                with map_http_errors(str(response.url.origin()), limit):
                    async with asyncio.timeout_at(deadline):
                        chunk = await response.content.readany()
                if not chunk:
                    break
                for line in _split_lines(rest, chunk):
                    yield line
        if rest:
            raise Unavailable(f"watch of {call.path} ended in the middle of an event")

    async def _with_retries(
        self, call: ApiRequest, send: Callable[[ApiRequest], Awaitable[Response]]
    ) -> Response:
        delays = self._backoff.delays()
        while True:
            try:
                return await send(call)
            except (LimitExceeded, Unavailable) as error:
                await self._wait_or_raise(call, error, next(delays, None))

    async def _send_once(self, call: ApiRequest) -> bytes:
        """Send a request; if the credentials are rejected and newer ones are available, send it once more."""
        credentials = await self._credentials.current()
        try:
            return await self._send_with(call, credentials)
        except Unauthenticated:
            self._credentials.invalidate(credentials)
            newer = await self._credentials.current()
            if newer == credentials:
                raise
        return await self._send_with(call, newer)

    async def _send_with(self, call: ApiRequest, credentials: RequestCredentials) -> bytes:
        with map_http_errors(credentials.config.server, self._timeout):
            async with (
                self._request_slots,
                asyncio.timeout(self._timeout.total_seconds()),
                self._request(call, credentials) as response,
            ):
                content = await response.read()
        if response.status < HTTPStatus.MULTIPLE_CHOICES:
            return content
        raise _error_of(response, content)

    async def _open(self, call: ApiRequest) -> aiohttp.ClientResponse:
        """Open a streaming response."""
        credentials = await self._credentials.current()
        with map_http_errors(credentials.config.server, self._timeout):
            async with asyncio.timeout(self._timeout.total_seconds()):
                response = await self._request(call, credentials)
                if response.status == HTTPStatus.OK:
                    return response
                async with response:
                    content = await response.read()
        if response.status == HTTPStatus.UNAUTHORIZED:
            self._credentials.invalidate(credentials)
        raise _error_of(response, content)

    def _request(self, call: ApiRequest, credentials: RequestCredentials) -> _RequestContextManager:
        config = credentials.config
        headers = CIMultiDict(credentials.headers)
        # Compression of large lists would cost more time and memory than it saves.
        headers["Accept-Encoding"] = "identity"
        headers["Accept"] = "application/json"
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        return self._session.request(
            call.method,
            yarl.URL(config.server + call.path, encoded=True).update_query(call.query),
            data=call.body,
            headers=headers,
            ssl=credentials.context or True,
            server_hostname=config.tls_server_name or None,
            proxy=config.proxy or None,
            timeout=_NO_TIMEOUT,
            allow_redirects=False,
        )

    async def _wait_or_raise(
        self, call: ApiRequest, error: LimitExceeded | Unavailable, delay: float | None
    ) -> None:
        """Sleep for the server's Retry-After; raise the error if there is none, or no retry is left."""
        # A rate-limited request was not processed. After other errors only reads are safe to repeat.
        is_safe = isinstance(error, LimitExceeded) or call.method == "GET"
        retry_after, longest = error.retry_after, self._backoff.longest.total_seconds()
        is_safe = is_safe and call.is_repeated
        if delay is None or not error.retryable or not is_safe or not 0 < retry_after <= longest:
            raise error
        await asyncio.sleep(max(delay, retry_after))


_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None)
"""Timeouts of the library are disabled: asyncio timeouts around each use replace them."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A watch may be idle for minutes: only TCP keep-alive detects that the server is gone."""


def _socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    for level, option, value in _KEEPALIVE:
        made.setsockopt(level, option, value)
    return made


def _error_of(response: aiohttp.ClientResponse, content: bytes) -> KubelendError:
    retry_after = response.headers.get("Retry-After")
    return codec.error_from_response(response.status, content, retry_after)


def _split_lines(rest: bytearray, chunk: bytes) -> Iterator[bytes]:
    """Yield the lines that end in this chunk; the remainder stays in `rest`."""
    searched = len(rest)
    rest += chunk
    begin = 0
    while (end := rest.find(b"\n", max(searched, begin))) >= 0:
        yield bytes(rest[begin:end])
        begin = end + 1
    del rest[:begin]
    if len(rest) > MAX_EVENT_BYTES:
        raise UnexpectedResponse(f"watch event exceeds {MAX_EVENT_BYTES} bytes")


@contextlib.contextmanager
def map_http_errors(server: str, timeout: timedelta) -> Iterator[None]:
    """Map exceptions of the HTTP library to retryable errors: networks and certificates can be repaired."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable(
            f"API server at {server} did not answer within {durations.format_duration_short(timeout)}",
            hint="check its load and the network",
        ) from error
    except aiohttp.ClientConnectorCertificateError as error:
        reason = error.certificate_error
        text = getattr(reason, "verify_message", "") or type(reason).__name__
        raise Unavailable(
            f"certificate of the API server at {server} is not trusted: {text}",
            hint="check the kubeconfig's certificate-authority and tls-server-name",
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise Unavailable(
            f"cannot connect to the API server at {server}: {_os_error_reason(error.os_error)}",
            hint="check that it runs, and its address",
        ) from error
    except aiohttp.ClientConnectionError as error:
        raise Unavailable(
            f"API server at {server} closed the connection", hint="wait, in case it restarts"
        ) from error
    except aiohttp.ClientError as error:
        # Without the exception's message, which may contain headers and thereby a token.
        raise Unavailable(
            f"invalid response from the API server at {server} ({type(error).__name__})",
            hint="check the address and the proxy",
        ) from error


def _os_error_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or type(error).__name__
