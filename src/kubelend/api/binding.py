"""What the HTTP server calls for every request: identity, limits, route, access, handler, errors.

Every error becomes a problem body, a metric and, where somebody was refused, a line in the log.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog
from aiohttp import web

from kubelend.api.calls import Call, Context
from kubelend.broker.writer import ACTOR
from kubelend.core.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidIdentity,
    KubelendError,
    LimitExceeded,
    MethodNotAllowed,
    TooSlow,
)
from kubelend.core.journal import Actor
from kubelend.core.roles import Role
from kubelend.pki.identities import Caller
from kubelend.wire import matching, problems
from kubelend.wire.matching import Match
from kubelend.wire.route import Access, Route

Handler = Callable[[Call], Awaitable[web.StreamResponse]]
HttpHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

UNKNOWN_ROUTE = "unknown"
GATHERED = frozenset({"publish"})
"""Calls that come all day from everyone, and whose answer nobody waits for: done several at a time."""

_PARTIES = frozenset({Role.CLUSTER, Role.VIEWER, Role.ADMIN})
_ALLOWED: dict[Access, frozenset[Role]] = {
    Access.ANYONE: _PARTIES,
    Access.CLUSTER: frozenset({Role.CLUSTER}),
    Access.OWNER: _PARTIES,
    Access.REQUESTER: frozenset({Role.CLUSTER, Role.ADMIN}),
    Access.PROVIDER: frozenset({Role.CLUSTER}),
    Access.READER: frozenset({Role.VIEWER, Role.ADMIN}),
    Access.ADMIN: frozenset({Role.ADMIN}),
}
"""Clusters get past OWNER, REQUESTER and PROVIDER: only the handler knows whose the object is."""

log = structlog.get_logger("kubelend.api")


def bind(handlers: Mapping[str, Handler], context: Context) -> HttpHandler:
    """All handlers, by the names of their routes, as the one that the server calls."""
    metrics, admit, caller_of = context.metrics, context.limiter.admit, context.callers.of

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter()
        found = matching.find(request.method, request.rel_url.raw_path)
        name = found.route.name if isinstance(found, Match) else UNKNOWN_ROUTE
        caller = None
        if name in GATHERED:
            await context.rhythm.join()
        try:
            caller = caller_of(request)
            ACTOR.set(Actor(caller.name, caller.role, request.remote or ""))
            admit(f"{caller.role} {caller.name}")  # a cluster may have the name of a person
            if not isinstance(found, Match):
                raise found
            _check_role(caller, found.route)
            response = await handlers[name](Call(request, caller, context, found.names))
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

    return answer


def _check_role(caller: Caller, route: Route) -> None:
    allowed = _ALLOWED[route.access]
    if caller.role not in allowed:
        raise Forbidden(
            f"{route.name} is not for the role {caller.role}",
            hint=f"it needs a certificate with the role {' or '.join(sorted(allowed))}",
        )


def _log_refusal(
    name: str, request: web.BaseRequest, caller: Caller | None, error: KubelendError
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


def _problem(error: KubelendError, request: web.BaseRequest) -> web.Response:
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
