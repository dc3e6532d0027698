"""Whose object is it? The part of access that needs the object, for all handlers alike."""

from __future__ import annotations

from kubelend.api.calls import Call
from kubelend.broker import parties
from kubelend.core.errors import Forbidden
from kubelend.core.models import ClusterId, Reservation
from kubelend.core.roles import Role


def only_itself(call: Call, cluster: ClusterId) -> None:
    """A cluster sees itself and no other; people see all."""
    if call.caller.role is Role.CLUSTER and call.caller.cluster != cluster:
        raise Forbidden(f"{call.caller.name} may not see {cluster}", hint="ask an administrator")


async def visible(call: Call) -> Reservation:
    """The reservation in the path, for those it concerns and for people."""
    if call.caller.role is not Role.CLUSTER:
        return await call.broker.reservation(call.reservation)
    return await parties.visible(call.broker, call.reservation, call.caller.cluster)


async def owned(call: Call) -> Reservation:
    """The reservation in the path, for its requester and for administrators, who mean to change it."""
    if call.caller.role is Role.ADMIN:
        call.broker.check_leading()
        return await call.broker.reservation(call.reservation)
    return await parties.owned(call.broker, call.reservation, call.caller.cluster)
