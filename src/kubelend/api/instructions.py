"""Handlers of instructions: list, stream (server-sent events), acknowledge and refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

import msgspec
from aiohttp import web

from kubelend.api import request
from kubelend.api.request import JsonResponse, RequestContext
from kubelend.broker import authorization, streams
from kubelend.broker.service import StreamStart
from kubelend.core.errors import InvalidInput, KubelendError, LimitExceeded
from kubelend.core.models import Reservation, ReservationId
from kubelend.wire import bodies, conversion
from kubelend.wire.route import LAST_EVENT_ID

KEEP_ALIVE_SECONDS = 15.0
"""Seconds without an event after which a stream sends a keep-alive, so that both ends detect a dead peer."""

MAX_STREAMS_PER_CLUSTER = 16
"""Maximum open streams per cluster: an agent needs one, and another during a restart."""

RESERVATIONS_PER_WRITE = 16
"""Reservations per write."""

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


async def list_instructions(call: RequestContext) -> web.StreamResponse:
    holds = await call.broker.holds(call.caller.cluster)
    return JsonResponse([conversion.from_reservation(found) for found in holds])


async def acknowledge(call: RequestContext) -> web.StreamResponse:
    body = await call.body(bodies.AcknowledgeRequest, optional=True)
    found = await authorization.acknowledge_hold(
        call.broker, call.reservation, call.caller.cluster, body
    )
    return JsonResponse(conversion.from_reservation(found))


async def refuse(call: RequestContext) -> web.StreamResponse:
    body = await call.body(bodies.RefuseRequest, optional=True)
    cluster = call.caller.cluster
    found = await authorization.refuse_hold(call.broker, call.reservation, cluster, body.reason)
    return JsonResponse(conversion.from_reservation(found))


async def exchange_handshake(call: RequestContext) -> web.StreamResponse:
    body, cluster = await call.body(bodies.Handshake), call.caller.cluster
    call.broker.check_leader()
    found = await authorization.visible_to(call.broker, call.reservation, cluster)
    peer = call.broker.handshakes.exchange(found, cluster, body)
    grant = await call.app.grant_signer.grant(found, cluster)
    return JsonResponse(bodies.HandshakeResult(peer, grant or ""))


async def stream_instructions(call: RequestContext) -> web.StreamResponse:
    """Serves server-sent events: first the current state, then each change as it becomes durable."""
    after, cluster = _last_event_id(call), call.caller.cluster
    if call.broker.streams.count(cluster) >= MAX_STREAMS_PER_CLUSTER:
        raise LimitExceeded(
            f"{cluster} has {MAX_STREAMS_PER_CLUSTER} streams open", retry_after=KEEP_ALIVE_SECONDS
        )
    async with call.broker.stream(cluster, after, call.caller.proxy) as opening:
        with request.hold_agent_session(call, opening.subscription):
            response = web.StreamResponse(headers=_HEADERS)
            with suppress(ConnectionResetError):  # the client disconnected
                await response.prepare(call.request)
                await _serve_stream(response, opening, call)
            return response


async def _serve_stream(
    response: web.StreamResponse, start: StreamStart, call: RequestContext
) -> None:
    if not start.resumed:
        # Without an id: a stream that breaks before the state is sent must not be resumed after it.
        await response.write(b"event: reset\ndata: {}\n\n")
    await _write_events(response, start.changes, call, b": open\n\n")
    while not start.subscription.closed and (timeout := _seconds_until_keep_alive(call)) > 0:
        news = await start.subscription.read(timeout)
        try:
            call.reauthenticate()
        except KubelendError:
            return  # the client gets the error when it reconnects
        handshakes = _encode_handshakes(start.subscription.take_handshakes())
        await _write_events(response, news, call, handshakes or b": alive\n\n")
        if news and handshakes:
            await response.write(handshakes)


def _seconds_until_keep_alive(call: RequestContext) -> float:
    """Seconds until the next keep-alive, or until the caller's certificate expires."""
    until = call.caller.until
    left = KEEP_ALIVE_SECONDS if until is None else (until - call.broker.clock()).total_seconds()
    return min(KEEP_ALIVE_SECONDS, left)


async def _write_events(
    response: web.StreamResponse,
    reservations: Iterable[Reservation],
    call: RequestContext,
    keep_alive: bytes,
) -> None:
    """Writes events in batches: a client that does not read is detected when the buffers are full."""
    left, silent = iter(reservations), True
    while portion := list(islice(left, RESERVATIONS_PER_WRITE)):
        if text := await _encode_events(portion, call):
            await response.write(text)
            silent = False
    if silent:
        await response.write(keep_alive)


async def _encode_events(reservations: Iterable[Reservation], call: RequestContext) -> bytes:
    texts = await asyncio.gather(
        *(
            _encode_event(instruction, call)
            for found in reservations
            for instruction in streams.instructions_for(call.caller.cluster, found)
        )
    )
    return b"".join(texts)


async def _encode_event(instruction: streams.Instruction, call: RequestContext) -> bytes:
    found = instruction.reservation
    grant = await call.app.grant_signer.grant(found, call.caller.cluster)
    text = msgspec.json.encode(authorization.instruction_body(instruction, grant or ""))
    return b"id: %d\nevent: instruction\ndata: %s\n\n" % (found.revision, text)


def _encode_handshakes(reservations: Iterable[ReservationId]) -> bytes:
    """Without an id: they are not resumed, because agents send theirs again after a reconnect."""
    bodies_ = (msgspec.json.encode({"reservation": each}) for each in reservations)
    return b"".join(b"event: handshake\ndata: %s\n\n" % each for each in bodies_)


def _last_event_id(call: RequestContext) -> int | None:
    text = call.request.headers.get(LAST_EVENT_ID, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise InvalidInput(f"{LAST_EVENT_ID}: {text[:24]!r} is not an event ID of this stream")
    return int(text)
