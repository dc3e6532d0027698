"""HTTP listeners: where the applications of `api` meet sockets, with a time limit on every wait."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import NamedTuple

from aiohttp import web

from kubelend.core.errors import InvalidSettings


BACKLOG = 1024
"""Connections that the kernel keeps for us: a whole fleet may come back at once."""


class Timeouts(NamedTuple):
    """How long a listener waits for its clients."""

    handshake: timedelta = timedelta(seconds=10)
    """From the connection to the end of the TLS handshake."""
    read: timedelta = timedelta(seconds=10)
    """From the first byte of a request to the end of its headers."""
    idle: timedelta = timedelta(seconds=75)
    """Between two requests of one connection."""
    shutdown: timedelta = timedelta(seconds=20)
    """For calls that have begun when the listener closes."""


@asynccontextmanager
async def listening(
    app: web.Application,
    host: str,
    port: int,
    timeouts: Timeouts,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve on an address; gives the port. At the end, calls that have begun are finished."""
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        keepalive_timeout=timeouts.idle.total_seconds(),
        shutdown_timeout=timeouts.shutdown.total_seconds(),
    )
    await runner.setup()
    server = await _bind(runner, host, port, timeouts, context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await runner.cleanup()


async def _bind(
    runner: web.AppRunner,
    host: str,
    port: int,
    timeouts: Timeouts,
    context: ssl.SSLContext | None,
) -> asyncio.Server:
    assert runner.server is not None  # noqa: S101 - set by setup()
    try:
        return await asyncio.get_running_loop().create_server(
            runner.server,
            host or None,
            port,
            ssl=context,
            ssl_handshake_timeout=timeouts.handshake.total_seconds() if context else None,
            backlog=BACKLOG,
        )
    except OSError as problem:
        await runner.cleanup()
        where = f"{host or '*'}:{port}"
        raise InvalidSettings(
            f"cannot listen on {where}: {problem.strerror or problem}", hint="choose another port"
        ) from problem
