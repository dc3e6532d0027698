"""A client's connections, all made with the newest certificate of its directory.

When the files change, calls that have begun finish where they are, and all others go over new
connections: the broker refuses a certificate that has ended also on a connection that is still open.
`transports.sessions` takes a lease for each call.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import aiohttp

from kubelend.core.errors import BrokerUnreachable
from kubelend.transports import tls
from kubelend.transports.following import Following, Report

KEPT_FOR = timedelta(seconds=60)
"""How long a connection waits for its next call: longer than an agent does between two advertisements, or
each would cost the broker a handshake; shorter than the broker keeps it, or calls would meet a closed one."""


class Connections:
    """Opened once, and closed with all that is still under way."""

    def __init__(
        self,
        directory: Path,
        check_every: timedelta,
        report: Report,
        exchanged: Callable[[], None],
    ) -> None:
        """`report` and `exchanged`: told why files cannot be taken up, and when they were."""
        self._directory = directory
        self._check_every = check_every.total_seconds()
        self._report = report
        self._exchanged = exchanged
        self._checked_at = float("-inf")
        self._contexts: Following[ssl.SSLContext] | None = None
        self._is_closed = False
        self._generations: list[Generation] = []
        """The newest last; those before it are there for calls that have begun."""

    def open(self) -> None:
        """Read the files; no connection is made before the first call."""
        self._is_closed = False
        self._contexts = Following(self._directory, tls.client_context, self._report)
        self._checked_at = asyncio.get_running_loop().time()
        self._generations = [Generation(self._contexts.current)]

    async def close(self) -> None:
        generations, self._generations = self._generations, []
        self._contexts = None
        self._is_closed = True
        for generation in generations:
            await generation.session.close()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Generation]:
        """The newest connections, for one call."""
        await self.check()
        if self._is_closed:
            # What was under way is cut off, which is no mistake of whoever waits for it.
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

    async def is_newest(self, generation: Generation) -> bool:
        """Asked by whoever keeps a lease for long."""
        await self.check()
        return generation in self._generations[-1:]

    async def check(self) -> None:
        """Look at the files, unless that was a moment ago."""
        if asyncio.get_running_loop().time() - self._checked_at >= self._check_every:
            await self.refresh()

    async def refresh(self) -> bool:
        """Look at the files now; True if they had changed and are in use from here on."""
        self._checked_at = asyncio.get_running_loop().time()
        if self._contexts is None or not self._contexts.refresh():
            return False
        self._generations.append(Generation(self._contexts.current))
        self._exchanged()
        await self._close_old()
        return True

    async def _close_old(self) -> None:
        over = [generation for generation in self._generations[:-1] if not generation.calls]
        for generation in over:
            self._generations.remove(generation)
        for generation in over:
            await generation.session.close()


class Generation:
    """The connections of one certificate."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=context, limit=0, keepalive_timeout=KEPT_FOR.total_seconds()
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.calls = 0
