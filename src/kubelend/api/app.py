"""The REST application: authentication, rate limit, routing, authorization and dispatch of every request.

Rejections are logged and written to the audit log here, as are probes, metrics, version and the OpenAPI
document served. Errors become responses in `api.request`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog
from aiohttp import web

from kubelend.api import clusters, members, reservations
from kubelend.api import request as api_request
from kubelend.api.request import (
    JSON_HEADERS,
    RESPONSE_BYTES_PER_TOKEN,
    AppContext,
    JsonResponse,
    RequestContext,
    RequestScope,
)
from kubelend.broker.audit_log import AuditLog
from kubelend.broker.metrics import METRICS_CONTENT_TYPE, BrokerMetrics
from kubelend.broker.ports import Clock
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.core.audit_log import Actor
from kubelend.core.errors import (
    Conflict,
    Forbidden,
    Hidden,
    IdentityInUse,
    InvalidIdentity,
    KeyReused,
    KubelendError,
    LimitExceeded,
    QueueFull,
    QuotaExceeded,
    RateLimited,
    Revoked,
)
from kubelend.core.lifecycle import Role
from kubelend.kits.ratelimit import LogThrottle
from kubelend.pki.identity import Caller
from kubelend.transports import server
from kubelend.transports.server import HttpHandler
from kubelend.wire import bodies, openapi, routes
from kubelend.wire.route import AGENT_HEADER, Access, Route
from kubelend.wire.routes import RouteMatch

Handler = Callable[[RequestContext], Awaitable[web.StreamResponse]]

PROBE_ROUTES = frozenset({"healthz", "readyz"})
"""Routes that are served before the store, which holds the revocations, is loaded."""

AUDITED_ERRORS = (Forbidden, Hidden, InvalidIdentity, LimitExceeded, Conflict, KeyReused)
"""Errors that are written to the audit log. Malformed requests are not among them."""

_LOGGED_ERRORS = (Forbidden, InvalidIdentity, IdentityInUse, LimitExceeded)
_DECISIONS = (QuotaExceeded, QueueFull)
"""Decisions about reservations, which the broker logs itself."""
_RETRIED = (Revoked, IdentityInUse)
"""Errors of agents that retry as long as they run."""
_RETRIED_LOG_INTERVAL = 600.0
"""Seconds between two log lines about such an agent."""

_ALL_ROLES = frozenset({Role.CLUSTER, Role.VIEWER, Role.ADMIN})
_ALLOWED_ROLES: dict[Access, frozenset[Role]] = {
    Access.ANYONE: _ALL_ROLES,
    Access.CLUSTER: frozenset({Role.CLUSTER}),
    Access.OWNER: _ALL_ROLES,
    Access.PARTY: frozenset({Role.CLUSTER}),
    Access.REQUESTER: frozenset({Role.CLUSTER, Role.ADMIN}),
    Access.PROVIDER: frozenset({Role.CLUSTER}),
    Access.READER: frozenset({Role.VIEWER, Role.ADMIN}),
    Access.ADMIN: frozenset({Role.ADMIN}),
}
"""Where access depends on the object, the handler decides which clusters are allowed."""

log = structlog.get_logger("kubelend.api")


def make_api(handlers: Mapping[str, Handler], context: AppContext) -> api_request.HttpHandler:
    """Combines the handlers, by route name, into the one that the server calls."""
    admit, charge = context.rate_limiter.admit, context.rate_limiter.charge
    check = context.authenticator.check
    holder_of, caller_of = context.authenticator.connection_identity, context.authenticator.caller

    def enter(scope: RequestScope) -> Awaitable[web.StreamResponse]:
        request = scope.request
        found = routes.match_route(request.method, request.rel_url.raw_path)
        if isinstance(found, RouteMatch):
            scope.route, scope.path_params = found.route.name, found.names
        scope.caller = holder_of(request)  # set first, so that a rejected proxy is named
        scope.caller = caller = caller_of(scope.caller, request)
        CURRENT_ACTOR.set(_audit_actor(caller, request))
        admit(caller.rate_key)
        if scope.route not in PROBE_ROUTES or context.broker.unready is None:
            check(caller)
        if not isinstance(found, RouteMatch):
            raise found
        _check_role(caller, found.route)
        instance = request.headers.get(AGENT_HEADER)
        if instance:
            api_request.claim_agent_session(
                context.agent_sessions, scope.route, instance, caller, request.remote
            )
        return handlers[scope.route](RequestContext(request, caller, context, found.names))

    def charge_response(scope: RequestScope, response: web.StreamResponse) -> None:
        body = getattr(response, "body", None)
        if scope.caller and isinstance(body, bytes) and len(body) >= RESPONSE_BYTES_PER_TOKEN:
            charge(scope.caller.rate_key, len(body) // RESPONSE_BYTES_PER_TOKEN)

    recorder = _rejection_recorder(context.audit_log)
    return api_request.handle(enter, recorder, context.metrics, charge_response)


def _check_role(caller: Caller, route: Route) -> None:
    allowed = _ALLOWED_ROLES[route.access]
    if caller.role not in allowed:
        raise Forbidden(
            f"{route.name.replace('_', ' ')}: not allowed for the role {caller.role}",
            hint=f"use a certificate with the role {' or '.join(sorted(allowed))}",
        )


def _rejection_recorder(audit_log: AuditLog) -> api_request.OnRejected:
    repeats, retries = LogThrottle(), LogThrottle(_RETRIED_LOG_INTERVAL)

    def record_rejection(scope: RequestScope, error: KubelendError) -> None:
        _log_rejection(scope, error, retries if isinstance(error, _RETRIED) else repeats)
        if isinstance(error, AUDITED_ERRORS):
            actor = _audit_actor(scope.caller, scope.request)
            # The objects named in the path.
            subject = ",".join(f"{kind}/{name}" for kind, name in scope.path_params.items())
            audit_log.append_rejection(actor, scope.route, subject, error)

    return record_rejection


def _audit_actor(caller: Caller | None, request: web.BaseRequest) -> Actor:
    remote = request.remote or ""
    if caller is None:
        return Actor("", "unknown", remote)
    return Actor(caller.name, caller.role, remote, caller.proxy)


def _log_rejection(scope: RequestScope, error: KubelendError, throttle: LogThrottle) -> None:
    """Logs a request rejected for lack of permission or because of a limit.

    Errors that clients cause without a rate limit, or repeat automatically, are throttled.
    """
    caller, remote = scope.caller, scope.request.remote
    suppressed: int | None = 0
    if isinstance(error, (RateLimited, InvalidIdentity, *_RETRIED)):
        suppressed = throttle.suppressed((error.code, caller or remote))
    if isinstance(error, _DECISIONS):
        return
    if suppressed is not None and isinstance(error, _LOGGED_ERRORS):
        log.warning(
            "Request rejected",
            route=scope.route,
            caller=None if caller is None else caller.name,
            remote=remote,
            **({"via": caller.proxy} if caller is not None and caller.via else {}),
            code=error.code,
            error=error.message,
            **({"suppressed": suppressed} if suppressed else {}),
        )


def serve_metrics(metrics: BrokerMetrics, clock: Clock) -> HttpHandler:
    """Serves `/metrics`, rendered in another thread, so that a large fleet does not delay requests."""

    async def scrape() -> web.Response:
        text = await asyncio.to_thread(metrics.render, metrics.snapshot(clock()))
        return web.Response(body=text, headers={"Content-Type": METRICS_CONTENT_TYPE})

    return server.serve_pages({"/metrics": scrape})


async def healthz(_: RequestContext) -> web.StreamResponse:
    return web.Response(text="ok")


async def readyz(call: RequestContext) -> web.StreamResponse:
    return server.readiness_response(call.broker.not_serving_reason, call.broker.readiness_detail)


async def grant_keys(call: RequestContext) -> web.StreamResponse:
    return JsonResponse(call.app.grant_signer.public)


async def version(call: RequestContext) -> web.StreamResponse:
    return JsonResponse(bodies.Version(call.app.version))


async def openapi_document(call: RequestContext) -> web.StreamResponse:
    return web.Response(body=openapi.document_bytes(call.app.version), headers=JSON_HEADERS)


HANDLERS: dict[str, Handler] = {
    "publish": clusters.publish_advertisement,
    "get_advertisement": clusters.get_advertisement,
    "reserve": reservations.reserve,
    "list_reservations": reservations.list_reservations,
    "get_reservation": reservations.get_reservation,
    "grant": reservations.get_grant,
    "release": reservations.release,
    "activate": reservations.activate,
    "renew": reservations.renew,
    "explain_reservation": reservations.explain_reservation,
    "explain": reservations.explain,
    "instructions": reservations.list_instructions,
    "stream": reservations.stream_instructions,
    "acknowledge": reservations.acknowledge,
    "refuse": reservations.refuse,
    "exchange_handshake": reservations.exchange_handshake,
    "list_clusters": clusters.list_clusters,
    "get_cluster": clusters.get_cluster,
    "cordon": clusters.cordon,
    "uncordon": clusters.uncordon,
    "drain": clusters.drain,
    "remove_cluster": clusters.remove_cluster,
    "list_policies": clusters.list_policies,
    "get_policy": clusters.get_policy,
    "set_policy": clusters.set_policy,
    "clear_policy": clusters.clear_policy,
    "list_quotas": clusters.list_quotas,
    "get_quota": clusters.get_quota,
    "set_quota": clusters.set_quota,
    "clear_quota": clusters.clear_quota,
    "create_token": members.create_token,
    "list_tokens": members.list_tokens,
    "delete_token": members.delete_token,
    "list_members": members.list_members,
    "approve_member": members.approve_member,
    "deny_member": members.deny_member,
    "revoke_member": members.revoke_member,
    "remove_member": members.remove_member,
    "renew_certificate": members.renew_certificate,
    "audit_log": members.audit_log,
    "grant_keys": grant_keys,
    "version": version,
    "openapi": openapi_document,
    "healthz": healthz,
    "readyz": readyz,
}
