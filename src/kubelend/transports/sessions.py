"""Sends requests to the broker: connection pools, timeouts, retries, and errors by class.

An error of the broker is raised as the class that the broker raised; no response at all is
`BrokerUnreachable`. Idempotent requests are retried while the error is retryable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
import yarl

from kubelend.core.errors import BrokerUnreachable, KubelendError, LimitExceeded
from kubelend.kits.backoff import Backoff
from kubelend.transports import calls, failures
from kubelend.transports.calls import PreparedRequest, Response
from kubelend.transports.connections import ConnectionPools
from kubelend.transports.following import ReportError
from kubelend.wire import bodies, problems, route

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
        """`instance` is the instance name of an agent, see `route.AGENT`."""
        self.backoff = backoff
        self._url = url.rstrip("/")
        self._endpoint = failures.BrokerEndpoint(self._url, directory)
        self._timeout = timeout
        self._check_every = check_every
        self._headers = {route.AGENT_HEADER: instance} if instance else {}
        self._connections = ConnectionPools(directory, check_every, report, self._endpoint.reset)

    async def __aenter__(self) -> Self:
        self._connections.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Sends the request of a route (see `make_request`), and decodes the response."""
        call = calls.make_request(name, *names, query=query, body=body, headers=headers)
        return (await self.send(call)).decode(kind)

    async def send(self, call: PreparedRequest) -> Response:
        """Sends a request, with retries if it is idempotent."""
        delays = self.backoff.delays() if call.route.is_repeatable else iter(())
        while True:
            try:
                return await self._send_once(call)
            except KubelendError as error:
                # If the certificate was the cause, a new one may be available.
                if not (await self.refresh() and call.route.is_repeatable):
                    await self.wait_before_retry(error, next(delays, None))

    async def stream(
        self, call: PreparedRequest, read_timeout: timedelta
    ) -> AsyncGenerator[bytes, None]:
        """Yields chunks of one streaming response, until a new certificate is available.

        Raises if the broker closes the connection, or sends nothing for `silence`.
        """
        timeout = aiohttp.ClientTimeout(
            connect=self._timeout.total_seconds(), sock_read=read_timeout.total_seconds()
        )
        with self._endpoint.translate_errors(read_timeout):
            async with (
                self._connections.lease() as own,
                self._request(own.session, call, timeout) as response,
            ):
                if response.status not in call.route.responses:
                    self._raise_for_status(call, response, await response.read())
                self._endpoint.has_answered = True
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
        asked = error.retry_after if isinstance(error, LimitExceeded) else 0.0
        # An untrusted certificate is not retryable.
        is_distrust = isinstance(error.__cause__, aiohttp.ClientSSLError)
        if delay is None or not error.retryable or is_distrust or asked > longest:
            raise error
        await asyncio.sleep(max(delay, asked))

    async def _send_once(self, call: PreparedRequest) -> Response:
        timeout = aiohttp.ClientTimeout(total=self._timeout.total_seconds())
        with self._endpoint.translate_errors(self._timeout):
            async with (
                self._connections.lease() as own,
                self._request(own.session, call, timeout) as response,
            ):
                content = await response.read()
        return self._raise_for_status(call, response, content)

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

    def _raise_for_status(
        self, call: PreparedRequest, response: aiohttp.ClientResponse, content: bytes
    ) -> Response:
        self._endpoint.has_answered = True
        if response.status in call.route.responses:
            return Response(response.status, content)
        error = problems.error_from_response(response.status, content)
        if isinstance(error, LimitExceeded):
            error.retry_after = _retry_after_seconds(
                response.headers.get("Retry-After"), error.retry_after
            )
        raise error


def _retry_after_seconds(header: str | None, otherwise: float) -> float:
    # The broker never sends a date.
    return float(header) if header and header.isascii() and header.isdigit() else otherwise
