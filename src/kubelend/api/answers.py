"""JSON responses, written as one piece: head and body.

aiohttp puts each header into a dictionary, calls hooks and serializes them: a tenth of the cost of a
request. Here the head is a template with the length and the date.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

JSON_CONTENT_TYPE: Final = "application/json"

_encode_json = msgspec.json.Encoder().encode


class JsonResponse(web.StreamResponse):
    """A response with a body of `wire.bodies`; can be sent once."""

    def __init__(self, body: Any, status: int = HTTPStatus.OK) -> None:
        super().__init__(status=status)
        self.body = _encode_json(body)
        self._keeps_alive = True

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays open after this response."""
        return self._keeps_alive

    def force_close(self) -> None:
        self._keeps_alive = False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        """Sends head and body."""
        self._keeps_alive = self._keeps_alive and request.keep_alive
        head = _response_head(self.status, self._keeps_alive, int(time.time())) % len(self.body)
        await request.writer.write(head if request.method == hdrs.METH_HEAD else head + self.body)
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Does nothing: `prepare` has sent everything."""


@lru_cache(maxsize=64)
def _response_head(status: int, stays_open: bool, now: int) -> bytes:
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {JSON_CONTENT_TYPE}",
        "Content-Length: %d",
        f"Date: {formatdate(now, usegmt=True)}",
        f"Connection: {'keep-alive' if stays_open else 'close'}",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii")
