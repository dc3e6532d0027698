"""What the REST interface does with every request: identity, limits, route, access, handler.

Where somebody was refused, there is a line in the log or the journal. All else about errors: `api.roots`.
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


def bind(handlers: Mapping[str, Handler], context: Context) -> roots.HttpHandler:
    """All handlers, by the names of their routes, as the one that the server calls."""
    admit, check = context.limiter.admit, context.callers.check
    holder_of, caller_of = context.callers.holder, context.callers.of

    def enter(visit: Visit) -> Awaitable[web.StreamResponse]:
        request = visit.request
        found = matching.find(request.method, request.rel_url.raw_path)
        if isinstance(found, Match):
            visit.route, visit.names = found.route.name, found.names
        visit.caller = holder_of(request)  # a proxy is named, where it is the proxy that is refused
        visit.caller = caller = caller_of(visit.caller, request)
        ACTOR.set(_actor(caller, request))
        admit(f"{caller.role} {caller.name}")  # a cluster may have the name of a person
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
            f"{route.name} is not for the role {caller.role}",
            hint=f"it needs a certificate with the role {' or '.join(sorted(allowed))}",
        )


def _teller(journal: Journal) -> roots.Refused:
    """Tells of refusals in the log and in the journal."""
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
    """What the call was about, as far as its path says."""
    return ",".join(f"{kind}/{name}" for kind, name in visit.names.items())


def _log_refusal(visit: Visit, error: KubelendError, repeats: Repeats) -> None:
    """Who was kept out, and of what. A request that merely does not fit or is mistaken is no such line.

    Those that come again and again by themselves, or without a limit of calls, are told now and then.
    """
    caller, remote = visit.caller, visit.request.remote
    left_out: int | None = 0
    if isinstance(error, RateLimited | InvalidIdentity | IdentityInUse):
        left_out = repeats.left_out((error.code, caller or remote))
    if left_out is not None and isinstance(error, _LOGGED):
        log.warning(
            "refused",
            route=visit.route,
            caller=None if caller is None else caller.name,
            remote=remote,
            **({"via": caller.proxy} if caller is not None and caller.via else {}),
            code=error.code,
            problem=error.message,
            **({"left_out": left_out} if left_out else {}),
        )
