"""The REST application: authentication, rate limit, routing, authorization and dispatch of every request.

Rejections are logged and written to the audit log here. Errors become responses in `api.middleware`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import structlog
from aiohttp import web

from kubelend.api import roots, speaking
from kubelend.api.calls import Call, Context
from kubelend.api.roots import Visit
from kubelend.broker.journal import Journal
from kubelend.broker.writer import ACTOR
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
)
from kubelend.core.journal import Actor
from kubelend.core.roles import Role
from kubelend.kits.repeats import Repeats
from kubelend.pki.identities import Caller
from kubelend.wire import matching
from kubelend.wire.matching import Match
from kubelend.wire.route import AGENT, Access, Route

Handler = Callable[[Call], Awaitable[web.StreamResponse]]

PROBES = frozenset({"healthz", "readyz"})
"""Routes that are served before the store, which holds the revocations, is loaded."""

TOLD = (Forbidden, Hidden, InvalidIdentity, LimitExceeded, Conflict, KeyReused)
"""Errors that are written to the audit log. Malformed requests are not among them."""

_LOGGED = (Forbidden, InvalidIdentity, IdentityInUse, LimitExceeded)
_DECISIONS = (QuotaExceeded, QueueFull)
"""Decisions about reservations, which the broker logs itself."""

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
"""Where access depends on the object, the handler decides which clusters are allowed."""

log = structlog.get_logger("kubelend.api")


def bind(handlers: Mapping[str, Handler], context: Context) -> roots.HttpHandler:
    """Combines the handlers, by route name, into the one that the server calls."""
    admit, check = context.limiter.admit, context.callers.check
    holder_of, caller_of = context.callers.holder, context.callers.of

    def enter(visit: Visit) -> Awaitable[web.StreamResponse]:
        request = visit.request
        found = matching.find(request.method, request.rel_url.raw_path)
        if isinstance(found, Match):
            visit.route, visit.names = found.route.name, found.names
        visit.caller = holder_of(request)  # set first, so that a rejected proxy is named
        visit.caller = caller = caller_of(visit.caller, request)
        ACTOR.set(_actor(caller, request))
        admit(f"{caller.role} {caller.name}")  # names are unique only within a role
        if visit.route not in PROBES or context.broker.unready is None:
            check(caller)
        if not isinstance(found, Match):
            raise found
        _check_role(caller, found.route)
        instance = request.headers.get(AGENT)
        if instance:
            speaking.admit(context.speakers, visit.route, instance, caller, request.remote)
        return handlers[visit.route](Call(request, caller, context, found.names))

    return roots.root(enter, _teller(context.journal), context.metrics)


def _check_role(caller: Caller, route: Route) -> None:
    allowed = _ALLOWED[route.access]
    if caller.role not in allowed:
        raise Forbidden(
            f"{route.name} is not allowed for the role {caller.role}",
            hint=f"use a certificate with the role {' or '.join(sorted(allowed))}",
        )


def _teller(journal: Journal) -> roots.Refused:
    """Returns a callback that logs and audits rejections."""
    repeats = Repeats()

    def tell(visit: Visit, error: KubelendError) -> None:
        _log_refusal(visit, error, repeats)
        if isinstance(error, TOLD):
            actor = _actor(visit.caller, visit.request)
            journal.refused(actor, visit.route, _subject(visit), error)

    return tell


def _actor(caller: Caller | None, request: web.BaseRequest) -> Actor:
    remote = request.remote or ""
    if caller is None:
        return Actor("", "unknown", remote)
    return Actor(caller.name, caller.role, remote, caller.proxy)


def _subject(visit: Visit) -> str:
    """Returns the objects named in the path."""
    return ",".join(f"{kind}/{name}" for kind, name in visit.names.items())


def _log_refusal(visit: Visit, error: KubelendError, repeats: Repeats) -> None:
    """Logs a request rejected for lack of permission or because of a limit.

    Errors that clients cause without a rate limit, or repeat automatically, are throttled.
    """
    caller, remote = visit.caller, visit.request.remote
    suppressed: int | None = 0
    if isinstance(error, RateLimited | InvalidIdentity | IdentityInUse):
        suppressed = repeats.left_out((error.code, caller or remote))
    if isinstance(error, _DECISIONS):
        return
    if suppressed is not None and isinstance(error, _LOGGED):
        log.warning(
            "Request rejected",
            route=visit.route,
            caller=None if caller is None else caller.name,
            remote=remote,
            **({"via": caller.proxy} if caller is not None and caller.via else {}),
            code=error.code,
            error=error.message,
            **({"suppressed": suppressed} if suppressed else {}),
        )
