"""Agent sessions over REST: of the agents of one cluster only one may act for it.

Agents name themselves in a header. Clients without it (command line, existing agents, curl) and users are
not affected. Reads are allowed for every agent with the certificate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from kubelend.api.calls import RequestContext
from kubelend.broker.feeds import Subscription
from kubelend.broker.speakers import AgentSessions
from kubelend.core.errors import IdentityInUse
from kubelend.core.roles import Role
from kubelend.pki.identities import Caller
from kubelend.wire import route, routes

SESSION_ROUTES = frozenset(found.name for found in routes.ROUTES if IdentityInUse in found.errors)
"""Routes that require the agent session. Certificate renewal does not."""


def claim_agent_session(
    sessions: AgentSessions, name: str, instance: str, caller: Caller, remote: str | None
) -> None:
    """Claims or touches the session of an agent; raises `IdentityInUse` while another one is active."""
    if caller.role is not Role.CLUSTER:
        return
    if name in SESSION_ROUTES:
        sessions.claim(caller.cluster, instance, _request_origin(caller, remote))
    else:
        sessions.touch(caller.cluster, instance)


def hold_agent_session(
    call: RequestContext, subscription: Subscription
) -> AbstractContextManager[None]:
    """Holds the agent session while its stream is open."""
    instance, caller = call.request.headers.get(route.AGENT_HEADER), call.caller
    if not instance:
        return nullcontext()
    origin = _request_origin(caller, call.request.remote)
    return call.app.agent_sessions.hold_open(caller.cluster, instance, origin, subscription)


def _request_origin(caller: Caller, remote: str | None) -> str:
    """Returns the proxy's name, or the remote address without one."""
    return f"through {caller.proxy}" if caller.via else f"from {remote or 'an unknown address'}"
