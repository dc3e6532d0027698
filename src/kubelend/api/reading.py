"""The bodies of calls: read within the limits of size and time, and checked against their types."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kubelend.core.errors import BodyTooLarge, InvalidInput, TooSlow

Body = TypeVar("Body")

_SEND_LESS = "send less in one body"


async def body(request: web.BaseRequest, kind: type[Body], timeout: float) -> Body:
    """The body of a request; it has `timeout` seconds to arrive."""
    return _checked(await _read(request, timeout), kind)


async def optional_body(request: web.BaseRequest, kind: type[Body], timeout: float) -> Body:
    """The same for a body which may be left out."""
    text = await _read(request, timeout)
    return _checked(text, kind) if text else kind()


async def _read(request: web.BaseRequest, timeout: float) -> bytes:
    content = request.content
    if content.is_eof() and content.exception() is None:
        return _checked_size(content.read_nowait(), request.client_max_size)
    return await _wait_for_body(request, timeout)


def _checked_size(text: bytes, largest: int) -> bytes:
    if len(text) > largest:
        raise _too_large(len(text), largest)
    return text


def _too_large(size: int | None, largest: int) -> BodyTooLarge:
    return BodyTooLarge(f"body: {size} bytes are more than {largest}", hint=_SEND_LESS)


async def _wait_for_body(request: web.BaseRequest, timeout: float) -> bytes:
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large(request.content_length, request.client_max_size)
    try:
        async with asyncio.timeout(timeout):
            await _ask_for_body(request)
            return await request.read()
    except TimeoutError:
        raise TooSlow("body: it did not arrive in time", hint="send all of it at once") from None
    except web.HTTPRequestEntityTooLarge as problem:
        raise BodyTooLarge(f"body: {problem.text}", hint=_SEND_LESS) from None
    except web.RequestPayloadError:
        # Or the server would look for the rest of it, and log what we answer.
        request.content.feed_eof()
        raise InvalidInput("body: it is not packed or divided as its headers say") from None


async def _ask_for_body(request: web.BaseRequest) -> None:
    """Some clients send a larger body only when they are told that it will be read."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun


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
