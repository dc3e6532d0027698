"""Reads and decodes request bodies within the limits of size and time."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kubelend.core.errors import BodyTooLarge, InvalidInput, TooSlow

Body = TypeVar("Body")

_SEND_LESS = "send a smaller body"


async def body(request: web.BaseRequest, kind: type[Body], timeout: float) -> Body:
    """Reads and decodes the body, which has to arrive within `timeout` seconds."""
    return _checked(await _read(request, timeout), kind)


async def optional_body(request: web.BaseRequest, kind: type[Body], timeout: float) -> Body:
    """Reads a body that may be empty."""
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
        raise TooSlow(
            "body: timed out while reading", hint="send the body without pauses"
        ) from None
    except web.HTTPRequestEntityTooLarge as problem:
        raise BodyTooLarge(f"body: {problem.text}", hint=_SEND_LESS) from None
    except web.RequestPayloadError:
        # Otherwise the server would wait for the rest, and log our response.
        request.content.feed_eof()
        raise InvalidInput("body: invalid content or transfer encoding") from None


async def _ask_for_body(request: web.BaseRequest) -> None:
    """Answers `Expect: 100-continue`, which some clients send before a large body."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the final response has not begun


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
