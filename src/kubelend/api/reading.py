"""Reads and decodes request bodies within the limits of size and time."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kubelend.core.errors import BodyTooLarge, InvalidInput, TooSlow

Body = TypeVar("Body")

_HINT_SMALLER_BODY = "send a smaller body"


async def read_body(request: web.BaseRequest, kind: type[Body], timeout: float) -> Body:
    """Reads and decodes the body, which has to arrive within `timeout` seconds."""
    return _decode_body(await _read_bytes(request, timeout), kind)


async def read_optional_body(request: web.BaseRequest, kind: type[Body], timeout: float) -> Body:
    """Reads a body that may be empty."""
    text = await _read_bytes(request, timeout)
    return _decode_body(text, kind) if text else kind()


async def _read_bytes(request: web.BaseRequest, timeout: float) -> bytes:
    content = request.content
    if content.is_eof() and content.exception() is None:
        return _check_body_size(content.read_nowait(), request.client_max_size)
    return await _wait_for_body(request, timeout)


def _check_body_size(text: bytes, largest: int) -> bytes:
    if len(text) > largest:
        raise _too_large(len(text), largest)
    return text


def _too_large(size: int | None, largest: int) -> BodyTooLarge:
    return BodyTooLarge(f"body: {size} bytes are more than {largest}", hint=_HINT_SMALLER_BODY)


async def _wait_for_body(request: web.BaseRequest, timeout: float) -> bytes:
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large(request.content_length, request.client_max_size)
    try:
        async with asyncio.timeout(timeout):
            await _send_continue(request)
            return await request.read()
    except TimeoutError:
        raise TooSlow(
            "body: timed out while reading", hint="send the body without pauses"
        ) from None
    except web.HTTPRequestEntityTooLarge as problem:
        raise BodyTooLarge(f"body: {problem.text}", hint=_HINT_SMALLER_BODY) from None
    except web.RequestPayloadError:
        # Otherwise the server would wait for the rest, and log our response.
        request.content.feed_eof()
        raise InvalidInput("body: invalid content or transfer encoding") from None


async def _send_continue(request: web.BaseRequest) -> None:
    """Answers `Expect: 100-continue`, which some clients send before a large body."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the final response has not begun


def _decode_body(text: bytes, kind: type[Body]) -> Body:
    try:
        body: Body = _body_decoder(kind).decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise InvalidInput(f"body: {problem}") from None
    return body


def _body_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    known = _BODY_DECODERS.get(kind)
    if known is None:
        known = _BODY_DECODERS[kind] = msgspec.json.Decoder(kind)
    return known


_BODY_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
