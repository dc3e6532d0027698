"""Handlers of instructions: list, stream (server-sent events), acknowledge and refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

import msgspec
from aiohttp import web

from kubelend.api import speaking
from kubelend.api.calls import Call, json
from kubelend.broker import instructions, parties
from kubelend.broker.views import Opening
from kubelend.core.errors import InvalidInput, KubelendError, LimitExceeded
from kubelend.core.models import Reservation
from kubelend.wire import bodies, conversion
from kubelend.wire.route import LAST_EVENT_ID

HEARTBEAT = 15.0
"""Seconds without an event after which a stream sends a keep-alive, so that both ends detect a dead peer."""

MOST_STREAMS = 16
"""Maximum open streams per cluster: an agent needs one, and another during a restart."""

PORTION = 16
"""Reservations per write."""

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


async def list_instructions(call: Call) -> web.StreamResponse:
    holds = await call.broker.holds(call.caller.cluster)
    return json([conversion.from_reservation(found) for found in holds])


async def acknowledge(call: Call) -> web.StreamResponse:
    found = await parties.acknowledge(call.broker, call.reservation, call.caller.cluster)
    return json(conversion.from_reservation(found))


async def refuse(call: Call) -> web.StreamResponse:
    body = await call.optional_body(bodies.RefuseRequest)
    cluster = call.caller.cluster
    found = await parties.refuse(call.broker, call.reservation, cluster, body.reason)
    return json(conversion.from_reservation(found))


async def stream(call: Call) -> web.StreamResponse:
    """Serves server-sent events: first the current state, then each change as it becomes durable."""
    after, cluster = _last_event(call), call.caller.cluster
    if call.broker.feeds.count(cluster) >= MOST_STREAMS:
        raise LimitExceeded(f"{cluster} has {MOST_STREAMS} streams open", retry_after=HEARTBEAT)
    async with call.broker.stream(cluster, after, call.caller.proxy) as opening:
        with speaking.streaming(call, opening.feed):
            response = web.StreamResponse(headers=_HEADERS)
            with suppress(ConnectionResetError):  # the client disconnected
                await response.prepare(call.request)
                await _pour(response, opening, call)
            return response


async def _pour(response: web.StreamResponse, opening: Opening, call: Call) -> None:
    if not opening.resumed:
        # Without an id: a stream that breaks before the state is sent must not be resumed after it.
        await response.write(b"event: reset\ndata: {}\n\n")
    await _tell(response, opening.news, call, b": open\n\n")
    while not opening.feed.closed and (patience := _patience(call)) > 0:
        news = await opening.feed.read(patience)
        if not _is_believed(call):
            return
        await _tell(response, news, call, b": alive\n\n")


def _is_believed(call: Call) -> bool:
    """Whether the caller and its proxy are still authenticated."""
    try:
        call.check_again()
    except KubelendError:
        return False  # the client gets the error when it reconnects
    return True


def _patience(call: Call) -> float:
    """Seconds until the next keep-alive, or until the caller's certificate expires."""
    until = call.caller.until
    left = HEARTBEAT if until is None else (until - call.broker.clock()).total_seconds()
    return min(HEARTBEAT, left)


async def _tell(
    response: web.StreamResponse, news: Iterable[Reservation], call: Call, otherwise: bytes
) -> None:
    """Writes events in batches: a client that does not read is detected when the buffers are full."""
    left, silent = iter(news), True
    while portion := list(islice(left, PORTION)):
        if text := await _events(portion, call):
            await response.write(text)
            silent = False
    if silent:
        await response.write(otherwise)


async def _events(news: Iterable[Reservation], call: Call) -> bytes:
    told = [
        instruction
        for found in news
        for instruction in instructions.for_cluster(call.caller.cluster, found)
    ]
    texts = await asyncio.gather(*(_event(instruction, call) for instruction in told))
    return b"".join(texts)


async def _event(instruction: instructions.Instruction, call: Call) -> bytes:
    found = instruction.reservation
    grant = await call.context.granting.grant(found, call.caller.cluster)
    text = msgspec.json.encode(parties.told(instruction, grant or ""))
    return b"id: %d\nevent: instruction\ndata: %s\n\n" % (found.revision, text)


def _last_event(call: Call) -> int | None:
    text = call.request.headers.get(LAST_EVENT_ID, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise InvalidInput(f"{LAST_EVENT_ID}: {text[:24]!r} is not an event ID of this stream")
    return int(text)
