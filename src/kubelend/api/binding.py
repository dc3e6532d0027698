"""From a route and its handler to what the HTTP server calls: identity, access, limits, errors.

Every call passes here, in this order: who is it, may it, not too often, the handler; and every error
becomes a problem body, a metric and, where somebody was refused, a line in the log.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from aiohttp import web

from kubelend.api.calls import Call, Context
from kubelend.core.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidIdentity,
    KubelendError,
    LimitExceeded,
    MethodNotAllowed,
    NotFound,
    TooSlow,
)
from kubelend.pki.identities import Caller, Role
from kubelend.wire import problems
from kubelend.wire.routes import Access, Route

Handler = Callable[[Call], Awaitable[web.StreamResponse]]
HttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

UNKNOWN_ROUTE = "unknown"

_PARTIES = frozenset({Role.CLUSTER, Role.VIEWER, Role.ADMIN})
_ALLOWED: dict[Access, frozenset[Role]] = {
    Access.ANYONE: _PARTIES,
    Access.CLUSTER: frozenset({Role.CLUSTER}),
    Access.OWNER: _PARTIES,
    Access.READER: frozenset({Role.VIEWER, Role.ADMIN}),
    Access.ADMIN: frozenset({Role.ADMIN}),
}
"""OWNER lets everyone through: only the handler knows whose the object is."""

log = structlog.get_logger("kubelend.api")


def bind(route: Route, handler: Handler, context: Context) -> HttpHandler:
    """The handler as the server calls it."""
    allowed = _ALLOWED[route.access]

    async def admitted(request: web.Request, caller: Caller) -> web.StreamResponse:
        if caller.role not in allowed:
            raise Forbidden(f"{route.name} is not for the role {caller.role}", hint=_needs(route))
        return await handler(Call(request, caller, context))

    return _guarded(route.name, admitted, context)


def fallback(app: web.Application, context: Context) -> HttpHandler:
    """Answers every path and method that no route has."""

    async def unknown(request: web.Request, _: Caller) -> web.StreamResponse:
        allowed: set[str] = set()
        for resource in app.router.resources():
            if resource.canonical != "/{path}":
                allowed |= (await resource.resolve(request))[1]
        if allowed:
            raise MethodNotAllowed(
                f"{request.method} is not for {request.path}",
                hint=f"use {', '.join(sorted(allowed))}",
                allowed=sorted(allowed),
            )
        raise NotFound(f"no route {request.path}", hint="see /openapi.json")

    return _guarded(UNKNOWN_ROUTE, unknown, context)


def _guarded(
    name: str,
    answer: Callable[[web.Request, Caller], Awaitable[web.StreamResponse]],
    context: Context,
) -> HttpHandler:
    metrics, admit, caller_of = context.metrics, context.limiter.admit, context.callers.of

    async def guarded(request: web.Request) -> web.StreamResponse:
        began = time.perf_counter()
        caller = None
        try:
            caller = caller_of(request)
            admit(caller.name)
            response = await answer(request, caller)
        except KubelendError as error:
            metrics.refused(name, error.code)
            _log_refusal(name, request, caller, error)
            response = _problem(error, request)
        except Exception:  # the root of a call: log, answer, and serve the next
            log.exception("call failed", route=name)
            failure = KubelendError("the broker failed", hint="its log says why")
            response = _problem(failure, request)
        metrics.answered(name, request.method, response.status, time.perf_counter() - began)
        return response

    return guarded


def _log_refusal(
    name: str, request: web.Request, caller: Caller | None, error: KubelendError
) -> None:
    """Who was kept out, and of what. A request that merely does not fit or is mistaken is no such line."""
    if isinstance(error, Forbidden | InvalidIdentity | LimitExceeded):
        log.warning(
            "refused",
            route=name,
            caller=None if caller is None else caller.name,
            remote=request.remote,
            code=error.code,
            problem=error.message,
        )


def _problem(error: KubelendError, request: web.Request) -> web.Response:
    body = problems.to_problem(error)
    headers = {"Content-Type": problems.CONTENT_TYPE}
    if isinstance(error, LimitExceeded) and error.retryable:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    response = web.Response(body=msgspec.json.encode(body), status=body.status, headers=headers)
    broken = request.content.exception() is not None
    if broken or isinstance(error, TooSlow | BodyTooLarge):
        response.force_close()  # the rest of the body is not waited for
    return response


def _needs(route: Route) -> str:
    wanted = " or ".join(sorted(_ALLOWED[route.access]))
    return f"it needs a certificate with the role {wanted}"
