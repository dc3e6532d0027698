"""Authorization that needs the object: who may see or change it."""

from __future__ import annotations

from kubelend.api.calls import RequestContext
from kubelend.broker import parties
from kubelend.core.errors import Forbidden
from kubelend.core.models import ClusterId, Reservation
from kubelend.core.roles import Role


def check_own_cluster(call: RequestContext, cluster: ClusterId) -> None:
    """Allows a cluster to see only itself; viewers and administrators see all."""
    if call.caller.role is Role.CLUSTER and call.caller.cluster != cluster:
        raise Forbidden(f"{call.caller.name} may not see {cluster}", hint="ask an administrator")


async def visible_reservation(call: RequestContext) -> Reservation:
    """Returns the reservation in the path to its clusters, viewers and administrators."""
    if call.caller.role is not Role.CLUSTER:
        return await call.broker.reservation(call.reservation)
    return await parties.visible_to(call.broker, call.reservation, call.caller.cluster)


async def owned_reservation(call: RequestContext) -> Reservation:
    """Returns the reservation in the path to its requester and administrators, for a change."""
    if call.caller.role is Role.ADMIN:
        call.broker.check_leader()
        return await call.broker.reservation(call.reservation)
    return await parties.owned_by(call.broker, call.reservation, call.caller.cluster)
