"""The enrolment listener: clients that have a join token and no certificate yet.

The REST API cannot be reached here. Wrong tokens are rate limited by address and logged; checking a token
takes the same time whether it exists or not. There is no global limit: secrets of 160 bits do not need one,
and an attacker that exhausts it would lock out everybody else.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import structlog
from aiohttp import web

from kubelend.api import reading, roots
from kubelend.api.calls import json
from kubelend.api.limits import RateLimiter
from kubelend.api.roots import Visit
from kubelend.broker.journal import Journal
from kubelend.broker.membership import Membership
from kubelend.broker.metrics import Metrics
from kubelend.broker.ports import Issued
from kubelend.broker.writer import ACTOR
from kubelend.core.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    KubelendError,
    LimitExceeded,
    MethodNotAllowed,
    NotFound,
    TokenRefused,
)
from kubelend.core.journal import Actor
from kubelend.core.members import TokenId
from kubelend.core.roles import Role
from kubelend.kits.networks import network
from kubelend.kits.repeats import Repeats
from kubelend.pki import identities, tokens
from kubelend.transports.admission import Room
from kubelend.wire import enrolment, membership_bodies
from kubelend.wire.enrolment import EnrolmentRoute

MOST_BYTES = 24 * 1024
"""Maximum size of a body: certificate signing request, token and name."""

ROOM = Room(connections=512, caller=8, handshakes=16)
"""Clients are unauthenticated and may use many addresses, so each address gets few connections."""

PATIENCE = 3.0
"""Maximum seconds for a request to arrive: requests are short and clients unauthenticated."""

CALLS, CALLS_AT_ONCE = 5.0, 50
"""Requests per second and burst of one address."""

WRONG, WRONG_AT_ONCE = 10 / 60, 10
"""Wrong tokens per second and burst of one address."""

LOGGED, LOGGED_AT_ONCE = 5.0, 100
"""Log lines per second and burst about rejections, for all addresses together."""

NEWCOMER = "newcomer"
"""Role of an unauthenticated client in the audit log."""

ACCEPTED = 202

log = structlog.get_logger("kubelend.api")


class Tries:
    """Limits wrong tokens by network.

    An attempt is taken before the token is checked, and returned if the token is valid: so concurrent
    requests cannot exceed the limit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_network = RateLimiter(WRONG, WRONG_AT_ONCE, clock)

    def take(self, network: str) -> None:
        try:
            self._by_network.admit(network)
        except LimitExceeded as problem:
            raise LimitExceeded(
                "too many wrong tokens", hint="try again later", retry_after=problem.retry_after
            ) from None

    def give_back(self, network: str) -> None:
        self._by_network.give_back(network)


class Enrolment(NamedTuple):
    """Dependencies of the handlers."""

    membership: Membership
    metrics: Metrics
    journal: Journal
    read_timeout: float
    calls: RateLimiter
    tries: Tries
    repeats: Repeats
    lines: RateLimiter


def bind(
    membership: Membership, metrics: Metrics, journal: Journal, read_timeout: float
) -> roots.HttpHandler:
    """Combines both routes into the handler that the server calls."""
    context = Enrolment(
        membership,
        metrics,
        journal,
        read_timeout,
        RateLimiter(CALLS, CALLS_AT_ONCE, time.monotonic),
        Tries(),
        Repeats(),
        RateLimiter(LOGGED, LOGGED_AT_ONCE, time.monotonic),
    )

    def enter(visit: Visit) -> Awaitable[web.StreamResponse]:
        request = visit.request
        ACTOR.set(_actor(request))
        found = _route(request, context.membership.api_port)
        if isinstance(found, EnrolmentRoute):
            visit.route = found.name
        context.calls.admit(network(request.remote or ""))
        if not isinstance(found, EnrolmentRoute):
            raise found
        return _HANDLERS[found](request, context)

    return roots.root(enter, partial(_tell, context), metrics)


async def _authorities(_: web.BaseRequest, context: Enrolment) -> web.StreamResponse:
    return web.Response(
        text=context.membership.authority.authorities, content_type=enrolment.PEM_TYPE
    )


async def _join(request: web.BaseRequest, context: Enrolment) -> web.StreamResponse:
    body = await reading.body(request, membership_bodies.JoinRequest, context.read_timeout)
    role = _role(body.role)
    ACTOR.set(_actor(request, body.name))
    source = network(request.remote or "")
    context.tries.take(source)
    try:
        shown = tokens.parse(body.token)
        answer = await context.membership.join(
            TokenId(shown.id), tokens.digest(shown.secret), role, body.name, body.request
        )
    except TokenRefused:
        raise
    except KubelendError:
        context.tries.give_back(source)
        raise
    context.tries.give_back(source)
    if not isinstance(answer, Issued):
        return json(membership_bodies.JoinWaits("Pending", answer.asks), ACCEPTED)
    port = context.membership.api_port
    return json(membership_bodies.Joined(answer.chain, answer.authorities, port))


_HANDLERS: dict[
    EnrolmentRoute, Callable[[web.BaseRequest, Enrolment], Awaitable[web.StreamResponse]]
] = {
    enrolment.AUTHORITIES: _authorities,
    enrolment.JOIN: _join,
}


def _route(request: web.BaseRequest, api_port: int) -> EnrolmentRoute | NotFound | MethodNotAllowed:
    path = request.rel_url.raw_path
    known = [route for route in enrolment.ROUTES if route.path == path]
    if not known:
        return NotFound("this is the enrolment port", hint=f"use {api_port} for the API")
    for route in known:
        if route.method == request.method:
            return route
    allowed = [route.method for route in known]
    return MethodNotAllowed(f"{request.method} is not allowed for {path}", allowed=allowed)


def _role(text: str) -> Role | None:
    if text and text not in list(Role):
        raise InvalidInput(f"role: {text[:24]!r} is unknown", hint="use cluster, viewer or admin")
    return Role(text) if text else None


def _actor(request: web.BaseRequest, name: str = "") -> Actor:
    # The name is unverified: an invalid one is not recorded.
    known = name if len(name) <= identities.LONGEST_NAME and name.isprintable() else ""
    return Actor(known, NEWCOMER, request.remote or "")


def _tell(context: Enrolment, visit: Visit, error: KubelendError) -> None:
    """Logs and audits rejections, throttled."""
    if not isinstance(error, Forbidden | LimitExceeded | Conflict):
        return
    remote = visit.request.remote
    # Without the name: a client could fill the audit log with different names.
    actor = _actor(visit.request) if isinstance(error, LimitExceeded) else ACTOR.get()
    context.journal.refused(actor, visit.route, "", error)
    suppressed = context.repeats.left_out((error.code, network(remote or "")))
    if suppressed is not None and _may_log(context.lines):
        log.warning(
            "Request rejected",
            route=visit.route,
            caller=actor.name or None,
            remote=remote,
            code=error.code,
            error=error.message,
            suppressed=suppressed,
        )


def _may_log(lines: RateLimiter) -> bool:
    try:
        lines.admit("")
    except LimitExceeded:
        return False
    return True
