"""Handlers of reservations: reserve, list, get, explain, activate, renew and release."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from kubelend.api import access
from kubelend.api.calls import Call, cut, json
from kubelend.broker import parties
from kubelend.broker.instructions import Side
from kubelend.broker.views import Page
from kubelend.core import explanations
from kubelend.core.errors import InvalidInput, WrongPhase
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, Request, Reservation
from kubelend.core.roles import Role
from kubelend.wire import bodies, conversion, grant_bodies
from kubelend.wire.route import IDEMPOTENCY_KEY, MAX_KEY_LENGTH, MOST_OVER, checked_key

CREATED, ACCEPTED = 201, 202
CANDIDATES, MOST_CANDIDATES = 20, 100


async def reserve(call: Call) -> web.StreamResponse:
    """Responds 201 when placed, 202 when queued; with `dryRun`, 200 and the explanation."""
    request, candidates = await _request(call), _candidates(call)
    if call.flag("dryRun"):
        return await _dry_run(call, request, candidates)
    found = await call.broker.reserve(request)
    status = ACCEPTED if found.phase is Phase.PENDING else CREATED
    return json(conversion.from_reservation(found), status)


async def list_reservations(call: Call) -> web.StreamResponse:
    cluster, wanted = _filter(call)
    if cluster is not None and _knows_no_pages(call):
        whole = await call.broker.unpaged_reservations(wanted, cluster, MOST_OVER)
        return json(bodies.ReservationList([conversion.from_reservation(one) for one in whole]))
    limit = call.page_size()
    page = Page(call.number("continue", 0, 2**63 - 1), limit + 1)
    found = await call.broker.reservations(wanted, cluster, page)
    shown, more = cut(found, limit, lambda one: str(one.ticket))
    return json(bodies.ReservationList([conversion.from_reservation(one) for one in shown], more))


async def get_reservation(call: Call) -> web.StreamResponse:
    return json(conversion.from_reservation(await access.visible(call)))


async def grant(call: Call) -> web.StreamResponse:
    """Returns the signed grant, with which requester and provider prove the reservation to each other."""
    found = await access.visible(call)
    signed = await call.context.granting.grant(found, call.caller.cluster)
    if signed is None:
        raise WrongPhase(
            f"{found.id} is {found.phase}", hint="only a Reserved or Active reservation has a grant"
        )
    return json(grant_bodies.SignedGrant(signed))


async def release(call: Call) -> web.StreamResponse:
    """Releases a reservation; for a finished one, also archived, returns its final state."""
    found = await access.owned(call)
    by_admin = call.caller.role is Role.ADMIN
    reason = Reason.BY_ADMIN if by_admin else Reason.BY_REQUESTER
    return json(conversion.from_reservation(await call.broker.release(found.id, reason)))


async def activate(call: Call) -> web.StreamResponse:
    found = await access.owned(call)
    found = await call.broker.activate(parties.ongoing(found))
    return json(conversion.from_reservation(found))


async def renew(call: Call) -> web.StreamResponse:
    body = await call.optional_body(bodies.RenewRequest)
    found = await access.owned(call)
    terms = call.context.terms
    duration = conversion.bounded_duration(body.duration, terms) if body.duration else None
    found = await call.broker.renew(parties.ongoing(found), duration)
    return json(conversion.from_reservation(found))


async def explain(call: Call) -> web.StreamResponse:
    explanation = await call.broker.explain(await _request(call), _candidates(call))
    return json(conversion.from_explanation(explanation))


async def explain_reservation(call: Call) -> web.StreamResponse:
    found = await access.visible(call)
    explanation = await call.broker.explain_reservation(found, _candidates(call))
    return json(conversion.from_explanation(explanation))


async def _request(call: Call) -> Request:
    body = await call.body(bodies.ReservationRequest)
    return conversion.to_request(body, call.caller.cluster, _key(call), call.context.terms)


def _key(call: Call) -> str:
    try:
        return checked_key(call.request.headers.get(IDEMPOTENCY_KEY, ""))
    except InvalidInput:
        raise InvalidInput(
            f"{IDEMPOTENCY_KEY}: at most {MAX_KEY_LENGTH} printable ASCII characters"
        ) from None


async def _dry_run(call: Call, request: Request, candidates: int) -> web.StreamResponse:
    explanation = await call.broker.explain(request, candidates)
    if explanation.quota:
        raise explanation.quota[0]
    if not explanation.fitting:
        raise explanations.no_capacity(explanation)
    return json(conversion.from_explanation(explanation))


def _candidates(call: Call) -> int:
    return call.number("limit", CANDIDATES, MOST_CANDIDATES)


def _knows_no_pages(call: Call) -> bool:
    """Whether the client does not paginate: published agents pass `role` and expect the full list."""
    query = call.request.query
    return "role" in query and "limit" not in query and "continue" not in query


def _filter(call: Call) -> tuple[ClusterId | None, Callable[[Reservation], bool]]:
    """Clusters list their own, others all; `role`, `phase` and `cluster` filter."""
    cluster, side, phases = _whose(call), _side(call), _phases(call)

    def wanted(found: Reservation) -> bool:
        if phases and found.phase not in phases:
            return False
        asks = side is not Side.PROVIDER and found.requester == cluster
        lends = side is not Side.REQUESTER and found.target == cluster
        return cluster is None or asks or lends

    return cluster, wanted


def _whose(call: Call) -> ClusterId | None:
    named = call.request.query.get("cluster")
    if call.caller.role is Role.CLUSTER:
        if named is not None:
            access.only_itself(call, ClusterId(named))
        return call.caller.cluster
    if named is None and "role" in call.request.query:
        raise InvalidInput("role: needs a cluster", hint="add cluster=NAME")
    return None if named is None else ClusterId(named)


def _side(call: Call) -> Side | None:
    role = call.request.query.get("role")
    if role is None:
        return None
    try:
        return Side(role)
    except ValueError:
        raise InvalidInput(f"role: {role[:24]!r} is neither requester nor provider") from None


def _phases(call: Call) -> frozenset[Phase]:
    names = [name for name in call.request.query.get("phase", "").split(",") if name]
    try:
        return frozenset(Phase(name) for name in names)
    except ValueError:
        known = ", ".join(Phase)
        raise InvalidInput(
            f"phase: {names[:5]} contains an unknown phase", hint=f"use {known}"
        ) from None
