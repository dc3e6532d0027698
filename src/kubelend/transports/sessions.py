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
from kubelend.transports.calls import Answer, Call
from kubelend.transports.connections import Connections
from kubelend.transports.following import Report
from kubelend.wire import bodies, problems, route

Answered = TypeVar("Answered")

TIMEOUT = timedelta(seconds=30)
CHECK_EVERY = timedelta(seconds=1)
BACKOFF = Backoff()


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
        timeout: timedelta = TIMEOUT,
        backoff: Backoff = BACKOFF,
        check_every: timedelta = CHECK_EVERY,
        report: Report = lambda _: None,
        instance: str = "",
    ) -> None:
        """`instance` is the instance name of an agent, see `route.AGENT`."""
        self.backoff = backoff
        self._url = url.rstrip("/")
        self._peer = failures.Peer(self._url, directory)
        self._timeout = timeout
        self._check_every = check_every
        self._headers = {route.AGENT: instance} if instance else {}
        self._connections = Connections(directory, check_every, report, self._peer.forget)

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

    async def ask(
        self,
        kind: type[Answered],
        name: str,
        *names: str,
        query: Mapping[str, str] | None = None,
        body: bodies.Body | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        """Sends the request of a route (see `make_request`), and decodes the response."""
        call = calls.make(name, *names, query=query, body=body, headers=headers)
        return (await self.send(call)).read(kind)

    async def send(self, call: Call) -> Answer:
        """Sends a request, with retries if it is idempotent."""
        delays = self.backoff.delays() if call.route.is_repeatable else iter(())
        while True:
            try:
                return await self._once(call)
            except KubelendError as error:
                # If the certificate was the cause, a new one may be available.
                if not (await self.refresh() and call.route.is_repeatable):
                    await self.pause(error, next(delays, None))

    async def listen(self, call: Call, silence: timedelta) -> AsyncGenerator[bytes, None]:
        """Yields chunks of one streaming response, until a new certificate is available.

        Raises if the broker closes the connection, or sends nothing for `silence`.
        """
        timeout = aiohttp.ClientTimeout(
            connect=self._timeout.total_seconds(), sock_read=silence.total_seconds()
        )
        with self._peer.translated(silence):
            async with (
                self._connections.lease() as own,
                self._request(own.session, call, timeout) as response,
            ):
                if response.status not in call.route.answers:
                    self._accepted(call, response, await response.read())
                self._peer.has_answered = True
                while await self._connections.is_newest(own):
                    yield await self._chunk(response.content)

    async def refresh(self) -> bool:
        """Checks the files of the directory now; True if they have changed and were loaded."""
        return await self._connections.refresh()

    async def pause(
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

    async def _once(self, call: Call) -> Answer:
        timeout = aiohttp.ClientTimeout(total=self._timeout.total_seconds())
        with self._peer.translated(self._timeout):
            async with (
                self._connections.lease() as own,
                self._request(own.session, call, timeout) as response,
            ):
                content = await response.read()
        return self._accepted(call, response, content)

    def _request(
        self, session: aiohttp.ClientSession, call: Call, timeout: aiohttp.ClientTimeout
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return session.request(
            call.route.method,
            yarl.URL(self._url + call.target, encoded=True),
            data=call.body,
            headers={**call.headers, **self._headers},
            timeout=timeout,
            allow_redirects=False,
        )

    async def _chunk(self, content: aiohttp.StreamReader) -> bytes:
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

    def _accepted(self, call: Call, response: aiohttp.ClientResponse, content: bytes) -> Answer:
        self._peer.has_answered = True
        if response.status in call.route.answers:
            return Answer(response.status, content)
        error = problems.from_answer(response.status, content)
        if isinstance(error, LimitExceeded):
            error.retry_after = _seconds(response.headers.get("Retry-After"), error.retry_after)
        raise error


def _seconds(header: str | None, otherwise: float) -> float:
    # The broker never sends a date.
    return float(header) if header and header.isascii() and header.isdigit() else otherwise
