"""Agent sessions over REST: of the agents of one cluster only one may act for it.

Agents name themselves in a header. Clients without it (command line, existing agents, curl) and users are
not affected. Reads are allowed for every agent with the certificate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from kubelend.api.calls import Call
from kubelend.broker.feeds import Feed
from kubelend.broker.speakers import Speakers
from kubelend.core.errors import IdentityInUse
from kubelend.core.roles import Role
from kubelend.pki.identities import Caller
from kubelend.wire import route, routes

SPOKEN = frozenset(found.name for found in routes.ROUTES if IdentityInUse in found.errors)
"""Routes that require the agent session. Certificate renewal does not."""


def admit(speakers: Speakers, name: str, instance: str, caller: Caller, remote: str | None) -> None:
    """Claims or touches the session of an agent; raises `IdentityInUse` while another one is active."""
    if caller.role is not Role.CLUSTER:
        return
    if name in SPOKEN:
        speakers.speak(caller.cluster, instance, _origin(caller, remote))
    else:
        speakers.hear(caller.cluster, instance)


def streaming(call: Call, feed: Feed) -> AbstractContextManager[None]:
    """Holds the agent session while its stream is open."""
    instance, caller = call.request.headers.get(route.AGENT), call.caller
    if not instance:
        return nullcontext()
    origin = _origin(caller, call.request.remote)
    return call.context.speakers.streaming(caller.cluster, instance, origin, feed)


def _origin(caller: Caller, remote: str | None) -> str:
    """Returns the proxy's name, or the remote address without one."""
    return f"through {caller.proxy}" if caller.via else f"from {remote or 'an unknown address'}"
