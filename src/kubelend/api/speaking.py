"""Calls of agents, by the header in which an agent names itself: only one of a cluster's is listened to.

Whoever has no such header (the command line, existing agents, curl) is not concerned, and neither are
people. What only reads is answered to everybody with the certificate.
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
"""What an agent does in its cluster's name. The certificate itself is not: it may be renewed by anyone."""


def admit(speakers: Speakers, name: str, instance: str, caller: Caller, remote: str | None) -> None:
    """Take notice of an agent that calls the route of this name; `IdentityInUse` if another one speaks."""
    if caller.role is not Role.CLUSTER:
        return
    if name in SPOKEN:
        speakers.speak(caller.cluster, instance, _origin(caller, remote))
    else:
        speakers.hear(caller.cluster, instance)


def streaming(call: Call, feed: Feed) -> AbstractContextManager[None]:
    """For as long as an agent's stream is open."""
    instance, caller = call.request.headers.get(route.AGENT), call.caller
    if not instance:
        return nullcontext()
    origin = _origin(caller, call.request.remote)
    return call.context.speakers.streaming(caller.cluster, instance, origin, feed)


def _origin(caller: Caller, remote: str | None) -> str:
    """Behind a proxy the address is the proxy's, and says less than its name."""
    return f"through {caller.proxy}" if caller.via else f"from {remote or 'an unknown address'}"
