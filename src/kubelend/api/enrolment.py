"""The enrolment listener: clients that have a join token and no certificate yet.

The REST API cannot be reached here. Wrong tokens are rate limited by address and logged; checking a token
takes the same time whether it exists or not. There is no global limit: secrets of 160 bits do not need one,
and an attacker that exhausts it would lock out everybody else.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

import structlog
from aiohttp import web

from kubelend.api import request as api_request
from kubelend.api.request import JsonResponse, RequestScope
from kubelend.broker.audit_log import AuditLog
from kubelend.broker.membership import Membership
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.ports import Issued
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.core.audit_log import Actor
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
from kubelend.core.lifecycle import Role
from kubelend.core.members import TokenId
from kubelend.kits.ratelimit import LogThrottle, RateLimiter, rate_limit_key
from kubelend.pki import identity, tokens
from kubelend.transports.listener import ConnectionLimits
from kubelend.wire import admin_bodies, routes
from kubelend.wire.routes import EnrolmentRoute

MAX_BODY_BYTES = 24 * 1024
"""Maximum size of a body: certificate signing request, token and name."""

ENROLMENT_CONNECTIONS = ConnectionLimits(connections=512, per_caller=8, handshakes=256)
"""Clients are unauthenticated and may use many addresses, so each address gets few: 30 MB at most."""

READ_TIMEOUT = 3.0
"""Maximum seconds for a request to arrive: requests are short and clients unauthenticated."""

REQUEST_RATE, REQUEST_BURST = 5.0, 50
"""Requests per second and burst of one address."""

WRONG_TOKEN_RATE, WRONG_TOKEN_BURST = 10 / 60, 10
"""Wrong tokens per second and burst of one address."""

LOG_RATE, LOG_BURST = 5.0, 100
"""Log lines per second and burst about rejections, for all addresses together."""

APPLICANT_ROLE = "applicant"
"""Role of an unauthenticated client in the audit log."""

log = structlog.get_logger("kubelend.api")


class EnrolmentContext(NamedTuple):
    """Dependencies of the handlers."""

    membership: Membership
    metrics: BrokerMetrics
    audit_log: AuditLog
    read_timeout: float
    rate_limiter: RateLimiter
    wrong_tokens: RateLimiter
    throttle: LogThrottle
    log_limiter: RateLimiter


def make_enrolment_api(
    membership: Membership, metrics: BrokerMetrics, audit_log: AuditLog, read_timeout: float
) -> api_request.HttpHandler:
    """Combines both routes into the handler that the server calls."""
    context = EnrolmentContext(
        membership,
        metrics,
        audit_log,
        read_timeout,
        RateLimiter(REQUEST_RATE, REQUEST_BURST, time.monotonic),
        RateLimiter(WRONG_TOKEN_RATE, WRONG_TOKEN_BURST, time.monotonic),
        LogThrottle(),
        RateLimiter(LOG_RATE, LOG_BURST, time.monotonic),
    )

    def enter(scope: RequestScope) -> Awaitable[web.StreamResponse]:
        request = scope.request
        CURRENT_ACTOR.set(_actor(request))
        found = _route(request, context.membership.api_port)
        if isinstance(found, EnrolmentRoute):
            scope.route = found.name
        context.rate_limiter.admit(rate_limit_key(request.remote or ""))
        if not isinstance(found, EnrolmentRoute):
            raise found
        return _HANDLERS[found](request, context)

    return api_request.handle(enter, partial(_record_rejection, context), metrics)


async def _get_authorities(_: web.BaseRequest, context: EnrolmentContext) -> web.StreamResponse:
    return web.Response(text=context.membership.authority.authorities, content_type=routes.PEM_TYPE)


async def _post_join(request: web.BaseRequest, context: EnrolmentContext) -> web.StreamResponse:
    text = await api_request.read_body(request, context.read_timeout)
    body = api_request.decode_body(text, admin_bodies.JoinRequest)
    role = _parse_role(body.role)
    CURRENT_ACTOR.set(_actor(request, body.name))
    source = rate_limit_key(request.remote or "")
    # Taken before the token is checked, so that concurrent requests cannot exceed the limit.
    if wait := context.wrong_tokens.take(source):
        raise LimitExceeded("too many wrong tokens", hint="try again later", retry_after=wait)
    try:
        shown = tokens.parse_token(body.token)
        answer = await context.membership.join(
            TokenId(shown.id), tokens.secret_digest(shown.secret), role, body.name, body.request
        )
    except KubelendError as error:
        if not isinstance(error, TokenRefused):
            context.wrong_tokens.refund(source)
        raise
    context.wrong_tokens.refund(source)
    if not isinstance(answer, Issued):
        return JsonResponse(
            admin_bodies.JoinPending("Pending", answer.pending_key), HTTPStatus.ACCEPTED
        )
    port = context.membership.api_port
    return JsonResponse(admin_bodies.JoinResult(answer.chain, answer.authorities, port))


_HANDLERS: dict[
    EnrolmentRoute, Callable[[web.BaseRequest, EnrolmentContext], Awaitable[web.StreamResponse]]
] = {
    routes.AUTHORITIES_ROUTE: _get_authorities,
    routes.JOIN_ROUTE: _post_join,
}


def _route(request: web.BaseRequest, api_port: int) -> EnrolmentRoute | NotFound | MethodNotAllowed:
    path = request.rel_url.raw_path
    known = [route for route in routes.ENROLMENT_ROUTES if route.path == path]
    if not known:
        return NotFound("this is the enrolment port", hint=f"use {api_port} for the API")
    for route in known:
        if route.method == request.method:
            return route
    allowed = [route.method for route in known]
    return MethodNotAllowed(f"{request.method} is not allowed for {path}", allowed=allowed)


def _parse_role(text: str) -> Role | None:
    if text and text not in list(Role):
        raise InvalidInput(f"role: {text[:24]!r} is unknown", hint="use cluster, viewer or admin")
    return Role(text) if text else None


def _actor(request: web.BaseRequest, name: str = "") -> Actor:
    # The name is unverified: an invalid one is not recorded.
    known = name if len(name) <= identity.MAX_NAME_LENGTH and name.isprintable() else ""
    return Actor(known, APPLICANT_ROLE, request.remote or "")


def _record_rejection(context: EnrolmentContext, scope: RequestScope, error: KubelendError) -> None:
    """Logs and audits rejections, throttled."""
    if not isinstance(error, Forbidden | LimitExceeded | Conflict):
        return
    remote = scope.request.remote
    # Without the name: a client could fill the audit log with different names.
    actor = _actor(scope.request) if isinstance(error, LimitExceeded) else CURRENT_ACTOR.get()
    context.audit_log.append_rejection(actor, scope.route, "", error)
    suppressed = context.throttle.suppressed((error.code, rate_limit_key(remote or "")))
    if suppressed is not None and not context.log_limiter.take(""):
        log.warning(
            "Request rejected",
            route=scope.route,
            caller=actor.name or None,
            remote=remote,
            code=error.code,
            error=error.message,
            suppressed=suppressed,
        )
