"""HTTP connections that leave no socket open when their event loop ends."""

from __future__ import annotations

from functools import partial

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace


class AbortingConnector(aiohttp.TCPConnector):
    """Aborts connections that will not be used again, such as after `Connection: close` or a cancelled watch.

    aiohttp closes them gracefully, which waits for the server to close TLS too, and forgets them: a command
    that ends before that would leave the socket open.
    """

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        connection = await super().connect(req, traces, timeout)
        connection.add_callback(partial(_abort_if_unusable, connection.protocol))
        return connection


def _abort_if_unusable(protocol: ResponseHandler | None) -> None:
    if protocol is not None and protocol.should_close:
        protocol.abort()
