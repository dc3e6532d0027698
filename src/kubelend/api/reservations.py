"""Handlers of reservations: reserve, list, get, explain, activate, renew and release; and of their
instructions: list, stream (server-sent events), acknowledge and refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from itertools import islice

import msgspec
from aiohttp import web

from kubelend.api import request as api_request
from kubelend.api.request import JsonResponse, RequestContext, paginate
from kubelend.broker import authorization, streams
from kubelend.broker.service import PageRequest, StreamStart
from kubelend.broker.streams import Side
from kubelend.core import explanations
from kubelend.core.errors import InvalidInput, KubelendError, LimitExceeded, WrongPhase
from kubelend.core.lifecycle import Phase, Reason, Role
from kubelend.core.models import ClusterId, Request, Reservation, ReservationId
from kubelend.wire import bodies, conversion
from kubelend.wire.route import (
    IDEMPOTENCY_KEY,
    LAST_EVENT_ID,
    MAX_FINISHED,
    MAX_KEY_LENGTH,
    check_idempotency_key,
)

DEFAULT_CANDIDATES, MAX_CANDIDATES = 20, 100


async def reserve(call: RequestContext) -> web.StreamResponse:
    """Responds 201 when placed, 202 when queued; with `dryRun`, 200 and the explanation."""
    request, candidates = await _read_request(call), _candidate_limit(call)
    if call.query_bool("dryRun"):
        explanation = await call.broker.explain(request, candidates)
        if explanation.quota:
            raise explanation.quota[0]
        if not explanation.fitting:
            raise explanations.no_capacity_error(explanation)
        return JsonResponse(conversion.from_explanation(explanation))
    found = await call.broker.reserve(request)
    status = HTTPStatus.ACCEPTED if found.phase is Phase.PENDING else HTTPStatus.CREATED
    return JsonResponse(conversion.from_reservation(found), status)


async def list_reservations(call: RequestContext) -> web.StreamResponse:
    cluster, wanted = _reservation_filter(call)
    query = call.request.query
    # Published agents do not paginate: they pass `role` and expect the full list.
    unpaged = "role" in query and "limit" not in query and "continue" not in query
    if cluster is not None and unpaged:
        whole = await call.broker.unpaged_reservations(wanted, cluster, MAX_FINISHED)
        return JsonResponse(
            bodies.ReservationList([conversion.from_reservation(one) for one in whole])
        )
    limit = call.page_size()
    page = PageRequest(call.query_int("continue", 0, 2**63 - 1), limit + 1)
    found = await call.broker.reservations(wanted, cluster, page)
    shown, more = paginate(found, limit, lambda one: str(one.ticket))
    return JsonResponse(
        bodies.ReservationList([conversion.from_reservation(one) for one in shown], more)
    )


async def get_reservation(call: RequestContext) -> web.StreamResponse:
    return JsonResponse(conversion.from_reservation(await api_request.visible_reservation(call)))


async def get_grant(call: RequestContext) -> web.StreamResponse:
    """Returns the signed grant, with which requester and provider prove the reservation to each other."""
    found = await api_request.visible_reservation(call)
    signed = await call.app.grant_signer.grant(found, call.caller.cluster)
    if signed is None:
        raise WrongPhase(
            f"{found.id} is {found.phase}", hint="only a Reserved or Active reservation has a grant"
        )
    return JsonResponse(bodies.SignedGrant(signed))


async def release(call: RequestContext) -> web.StreamResponse:
    """Releases a reservation; for a finished one, also archived, returns its final state."""
    found = await api_request.owned_reservation(call)
    by_admin = call.caller.role is Role.ADMIN
    reason = Reason.BY_ADMIN if by_admin else Reason.BY_REQUESTER
    return JsonResponse(conversion.from_reservation(await call.broker.release(found.id, reason)))


async def activate(call: RequestContext) -> web.StreamResponse:
    found = await api_request.owned_reservation(call)
    found = await call.broker.activate(authorization.unfinished(found))
    return JsonResponse(conversion.from_reservation(found))


async def renew(call: RequestContext) -> web.StreamResponse:
    body = await call.body(bodies.RenewRequest, optional=True)
    found = await api_request.owned_reservation(call)
    terms = call.app.terms
    duration = conversion.bounded_duration(body.duration, terms) if body.duration else None
    found = await call.broker.renew(authorization.unfinished(found), duration)
    return JsonResponse(conversion.from_reservation(found))


async def explain(call: RequestContext) -> web.StreamResponse:
    explanation = await call.broker.explain(await _read_request(call), _candidate_limit(call))
    return JsonResponse(conversion.from_explanation(explanation))


async def explain_reservation(call: RequestContext) -> web.StreamResponse:
    found = await api_request.visible_reservation(call)
    others = None if call.caller.role is Role.CLUSTER else explanations.ExplainOthers.NAMES
    explanation = await call.broker.explain(found.request, _candidate_limit(call), found, others)
    return JsonResponse(conversion.from_explanation(explanation))


async def _read_request(call: RequestContext) -> Request:
    body = await call.body(bodies.ReservationRequest)
    return conversion.to_request(body, call.caller.cluster, _idempotency_key(call), call.app.terms)


def _idempotency_key(call: RequestContext) -> str:
    keys = call.request.headers.getall(IDEMPOTENCY_KEY, [""])
    if len(keys) > 1:
        raise InvalidInput(f"{IDEMPOTENCY_KEY}: sent {len(keys)} times", hint="send one key")
    try:
        return check_idempotency_key(keys[0])
    except InvalidInput:
        raise InvalidInput(
            f"{IDEMPOTENCY_KEY}: at most {MAX_KEY_LENGTH} printable ASCII characters"
        ) from None


def _candidate_limit(call: RequestContext) -> int:
    return call.query_int("limit", DEFAULT_CANDIDATES, MAX_CANDIDATES)


def _reservation_filter(
    call: RequestContext,
) -> tuple[ClusterId | None, Callable[[Reservation], bool]]:
    """Clusters list their own, others all; `role`, `phase` and `cluster` filter."""
    cluster, side, phases = _cluster_filter(call), _side_filter(call), _phase_filter(call)

    def wanted(found: Reservation) -> bool:
        if phases and found.phase not in phases:
            return False
        requester_id = side is not Side.PROVIDER and found.requester == cluster
        lends = side is not Side.REQUESTER and found.target == cluster
        return cluster is None or requester_id or lends

    return cluster, wanted


def _cluster_filter(call: RequestContext) -> ClusterId | None:
    named = call.request.query.get("cluster")
    if call.caller.role is Role.CLUSTER:
        if named is not None:
            api_request.check_own_cluster(call, ClusterId(named))
        return call.caller.cluster
    if named is None and "role" in call.request.query:
        raise InvalidInput("role: needs a cluster", hint="add cluster=NAME")
    return None if named is None else ClusterId(named)


def _side_filter(call: RequestContext) -> Side | None:
    role = call.request.query.get("role")
    if role is None:
        return None
    try:
        return Side(role)
    except ValueError:
        raise InvalidInput(f"role: {role[:24]!r} is neither requester nor provider") from None


def _phase_filter(call: RequestContext) -> frozenset[Phase]:
    names = [name for name in call.request.query.get("phase", "").split(",") if name]
    try:
        return frozenset(Phase(name) for name in names)
    except ValueError:
        known = ", ".join(Phase)
        raise InvalidInput(
            f"phase: {names[:5]} contains an unknown phase", hint=f"use {known}"
        ) from None


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
        with api_request.hold_agent_session(call, opening.subscription):
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
