"""Whose object is it? The part of access that needs the object, for all handlers alike."""

from __future__ import annotations

from kubelend.api.calls import Call
from kubelend.broker import instructions
from kubelend.core import transitions
from kubelend.core.errors import Forbidden, Hidden, WrongPhase, no_reservation
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.core.roles import Role


def only_itself(call: Call, cluster: ClusterId) -> None:
    """A cluster sees itself and no other; people see all."""
    if call.caller.role is Role.CLUSTER and call.caller.cluster != cluster:
        raise Forbidden(f"{call.caller.name} may not see {cluster}", hint="ask an administrator")


async def visible(call: Call) -> Reservation:
    """The reservation in the path, for those it concerns. To others it does not exist."""
    found = await call.broker.reservation(call.reservation)
    is_person = call.caller.role is not Role.CLUSTER
    if is_person or call.caller.cluster in instructions.concerned(found):
        return found
    raise no_reservation(call.reservation, Hidden)


async def owned(call: Call) -> Reservation:
    """The reservation in the path, for its requester and for administrators."""
    found = await visible(call)
    if call.caller.role is Role.ADMIN:
        return found
    if call.caller.role is Role.CLUSTER and call.caller.cluster == found.requester:
        return found
    raise Forbidden(f"{found.id} belongs to {found.requester}", hint="ask its requester")


def ongoing(found: Reservation) -> ReservationId:
    """The ID of one that has not ended. What has may be in the archive, where nothing changes."""
    if found.finished_at is not None:
        raise WrongPhase(f"{found.id} is {found.phase}", hint=transitions.next_step(found.phase))
    return found.id
