"""What the HTTP server calls for every request: identity, limits, route, access, handler, errors.

Every error becomes a problem body, a metric and, where somebody was refused, a line in the log.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog
from aiohttp import web

from kubelend.api import speaking
from kubelend.api.calls import Call, Context
from kubelend.broker.writer import ACTOR
from kubelend.core.errors import (
    BodyTooLarge,
    Conflict,
    Forbidden,
    Hidden,
    IdentityInUse,
    InvalidIdentity,
    KeyReused,
    KubelendError,
    LimitExceeded,
    MethodNotAllowed,
    NotLeader,
    RateLimited,
    Revoked,
    TooSlow,
    Unavailable,
)
from kubelend.core.journal import Actor
from kubelend.core.roles import Role
from kubelend.kits.repeats import Repeats
from kubelend.pki import forwarding
from kubelend.pki.identities import Caller
from kubelend.wire import matching, problems
from kubelend.wire.matching import Match
from kubelend.wire.route import AGENT, Access, Route

Handler = Callable[[Call], Awaitable[web.StreamResponse]]
HttpHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

UNKNOWN_ROUTE = "unknown"
RETRY_AFTER = "2"
"""Seconds after which to ask a broker again that cannot answer now."""

PROBES = frozenset({"healthz", "readyz"})
"""What is answered also while the store is not read that knows who was put out."""

TOLD = (Forbidden, Hidden, InvalidIdentity, LimitExceeded, Conflict, KeyReused)
"""Refusals that the journal tells of: somebody may not, or cannot now. Mistakes are not among them."""

_LOGGED = (Forbidden, InvalidIdentity, IdentityInUse, LimitExceeded)

_PARTIES = frozenset({Role.CLUSTER, Role.VIEWER, Role.ADMIN})
_ALLOWED: dict[Access, frozenset[Role]] = {
    Access.ANYONE: _PARTIES,
    Access.CLUSTER: frozenset({Role.CLUSTER}),
    Access.OWNER: _PARTIES,
    Access.PARTY: frozenset({Role.CLUSTER}),
    Access.REQUESTER: frozenset({Role.CLUSTER, Role.ADMIN}),
    Access.PROVIDER: frozenset({Role.CLUSTER}),
    Access.READER: frozenset({Role.VIEWER, Role.ADMIN}),
    Access.ADMIN: frozenset({Role.ADMIN}),
}
"""Which clusters may is the handler's to say, where only it knows whose the object is."""

log = structlog.get_logger("kubelend.api")


def bind(handlers: Mapping[str, Handler], context: Context) -> HttpHandler:
    """All handlers, by the names of their routes, as the one that the server calls."""
    metrics, admit = context.metrics, context.limiter.admit
    holder_of, caller_of = context.callers.holder, context.callers.of
    check = context.callers.check
    repeats = Repeats()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter()
        found = matching.find(request.method, request.rel_url.raw_path)
        name = found.route.name if isinstance(found, Match) else UNKNOWN_ROUTE
        caller = None
        try:
            caller = holder_of(request)  # a proxy is named, where it is the proxy that is refused
            caller = caller_of(caller, request)
            ACTOR.set(_actor(caller, request))
            admit(f"{caller.role} {caller.name}")  # a cluster may have the name of a person
            if name not in PROBES or context.broker.unready is None:
                check(caller)
            if not isinstance(found, Match):
                raise found
            _check_role(caller, found.route)
            instance = request.headers.get(AGENT)
            if instance:
                speaking.admit(context.speakers, name, instance, caller, request.remote)
            response = await handlers[name](Call(request, caller, context, found.names))
        except KubelendError as error:
            metrics.refused(name, error.code)
            _log_refusal(name, request, caller, error, repeats)
            if isinstance(error, TOLD):
                context.journal.refused(_actor(caller, request), name, _subject(found), error)
            response = problem(error, request)
        except Exception:  # the root of a call: log, answer, and serve the next
            log.exception("call failed", route=name)
            failure = KubelendError("the broker failed", hint="its log says why")
            response = problem(failure, request)
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


def _actor(caller: Caller | None, request: web.BaseRequest) -> Actor:
    remote = request.remote or ""
    if caller is None:
        return Actor("", "unknown", remote)
    return Actor(caller.name, caller.role, remote, caller.proxy)


def _subject(found: Match | KubelendError) -> str:
    """What the call was about, as far as its path says."""
    if not isinstance(found, Match):
        return ""
    return ",".join(f"{kind}/{name}" for kind, name in found.names.items())


def _log_refusal(
    name: str,
    request: web.BaseRequest,
    caller: Caller | None,
    error: KubelendError,
    repeats: Repeats,
) -> None:
    """Who was kept out, and of what. A request that merely does not fit or is mistaken is no such line.

    Those that come again and again by themselves, or without a limit of calls, are told now and then.
    """
    left_out: int | None = 0
    if isinstance(error, RateLimited | InvalidIdentity | IdentityInUse):
        left_out = repeats.left_out((error.code, caller or request.remote))
    if left_out is not None and isinstance(error, _LOGGED):
        log.warning(
            "refused",
            route=name,
            caller=None if caller is None else caller.name,
            remote=request.remote,
            **({"via": caller.proxy} if caller is not None and caller.via else {}),
            code=error.code,
            problem=error.message,
            **({"left_out": left_out} if left_out else {}),
        )


def problem(error: KubelendError, request: web.BaseRequest) -> web.StreamResponse:
    """An error as an answer."""
    body = problems.to_problem(error)
    headers = {"Content-Type": problems.CONTENT_TYPE}
    if isinstance(error, LimitExceeded) and error.retryable:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Unavailable):
        headers["Retry-After"] = RETRY_AFTER
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    response = web.Response(body=msgspec.json.encode(body), status=body.status, headers=headers)
    broken = request.content.exception() is not None
    if broken or isinstance(error, TooSlow | BodyTooLarge):
        response.force_close()  # the rest of the body is not waited for
    if isinstance(error, Revoked) and forwarding.HEADER not in request.headers:
        response.force_close()  # a proxy's connection is not its own to lose
    if isinstance(error, NotLeader):
        response.force_close()  # the next one may lead to the broker that does
    return response
