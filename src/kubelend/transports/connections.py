"""Client connections, always made with the latest certificate of a directory.

When the files change, running requests finish on their connections and new requests use new connections:
the broker rejects an expired certificate also on an open connection.
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
from kubelend.transports.following import FileReloader, ReportError

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
        """`report` is called when files cannot be loaded, `exchanged` after a reload."""
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
        for generation in over:
            self._generations.remove(generation)
        for generation in over:
            await generation.session.close()


class ConnectionPool:
    """The connection pool of one certificate."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=context, limit=0, keepalive_timeout=KEEP_ALIVE.total_seconds()
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.calls = 0
