"""One call on its way in: who calls, what was sent, and what the handlers may use to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from kubelend.api.callers import Callers
from kubelend.api.limits import RateLimiter
from kubelend.broker.metrics import Metrics
from kubelend.broker.service import Broker
from kubelend.core.errors import BodyTooLarge, InvalidInput, TooSlow
from kubelend.core.models import ClusterId, ReservationId
from kubelend.kits.rhythm import Rhythm
from kubelend.pki.identities import Caller
from kubelend.wire.conversion import Terms

Body = TypeVar("Body")

JSON = {"Content-Type": "application/json"}
LONGEST_PAGE = 1000

_SEND_LESS = "send less in one body"

_encode = msgspec.json.Encoder().encode


class Context(NamedTuple):
    """What every handler works with; made once by the composition root."""

    broker: Broker
    metrics: Metrics
    terms: Terms
    callers: Callers
    limiter: RateLimiter
    version: str
    rhythm: Rhythm
    """In which advertisements are taken in, once there are many."""
    read_timeout: float
    """Seconds within which a body has to arrive."""


class Call:
    """A request from a known caller."""

    __slots__ = ("_names", "caller", "context", "request")

    def __init__(
        self, request: web.BaseRequest, caller: Caller, context: Context, names: Mapping[str, str]
    ) -> None:
        self.request = request
        self.caller = caller
        self.context = context
        self._names = names

    @property
    def broker(self) -> Broker:
        return self.context.broker

    @property
    def cluster(self) -> ClusterId:
        """The cluster that the path names."""
        return ClusterId(self._names["cluster"])

    @property
    def reservation(self) -> ReservationId:
        """The reservation that the path names."""
        return ReservationId(self._names["reservation"])

    async def body(self, kind: type[Body]) -> Body:
        """The body, read within the limits of size and time, and checked against its type."""
        return _checked(await self._read(), kind)

    async def optional_body(self, kind: type[Body]) -> Body:
        """The same for a body which may be left out."""
        text = await self._read()
        return _checked(text, kind) if text else kind()

    def number(self, name: str, default: int, largest: int) -> int:
        """A whole number from the query."""
        text = self.request.query.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= largest):
            raise InvalidInput(f"{name}: {text[:24]!r} is no whole number from 0 to {largest}")
        return int(text)

    def page_size(self) -> int:
        return max(1, self.number("limit", 100, LONGEST_PAGE))

    async def _read(self) -> bytes:
        content = self.request.content
        if content.is_eof() and content.exception() is None:
            return self._checked_size(content.read_nowait())
        return await self._wait_for_body()

    def _checked_size(self, text: bytes) -> bytes:
        if len(text) > self.request.client_max_size:
            raise BodyTooLarge(
                f"body: {len(text)} bytes are more than {self.request.client_max_size}",
                hint=_SEND_LESS,
            )
        return text

    async def _ask_for_body(self) -> None:
        """Some clients send a larger body only when they are told that it will be read."""
        if self.request.headers.get("Expect", "").lower() == "100-continue":
            await self.request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.request.writer.output_size = 0  # the answer itself has not begun

    async def _wait_for_body(self) -> bytes:
        try:
            async with asyncio.timeout(self.context.read_timeout):
                await self._ask_for_body()
                return await self.request.read()
        except TimeoutError:
            raise TooSlow(
                "body: it did not arrive in time", hint="send all of it at once"
            ) from None
        except web.HTTPRequestEntityTooLarge as problem:
            raise BodyTooLarge(f"body: {problem.text}", hint=_SEND_LESS) from None
        except web.RequestPayloadError:
            # Or the server would look for the rest of it, and log what we answer.
            self.request.content.feed_eof()
            raise InvalidInput("body: it is not packed or divided as its headers say") from None


def json(body: Any, status: int = 200) -> web.Response:
    """An answer with a body of `wire.bodies`."""
    return web.Response(body=_encode(body), status=status, headers=JSON)


def _checked(text: bytes, kind: type[Body]) -> Body:
    try:
        body: Body = _decoder(kind).decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise InvalidInput(f"body: {problem}") from None
    return body


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    known = _DECODERS.get(kind)
    if known is None:
        known = _DECODERS[kind] = msgspec.json.Decoder(kind)
    return known


_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
