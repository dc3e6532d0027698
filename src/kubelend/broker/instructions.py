"""Instructions to the requester and the provider of a reservation, derived from its state."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId, Reservation


class Side(StrEnum):
    """The side of a reservation that a cluster is on."""

    REQUESTER = "requester"
    PROVIDER = "provider"


class Action(StrEnum):
    """What the cluster has to do. The values are API."""

    WAIT = "Wait"  # requester: not placed yet
    USE = "Use"  # requester: use this cluster
    STOP = "Stop"  # requester: the reservation is finished
    HOLD = "Hold"  # provider: hold these resources
    WITHDRAW = "Withdraw"  # provider: release the held resources


class Instruction(msgspec.Struct, frozen=True):
    """The instruction to one side of a reservation."""

    side: Side
    action: Action
    message: str
    reservation: Reservation


def instructions_for(cluster: ClusterId, reservation: Reservation) -> Iterator[Instruction]:
    """Yields the instructions of a reservation for a cluster; none if it is not concerned."""
    if cluster == reservation.requester:
        yield _requester_instruction(reservation)
    if cluster == reservation.target or cluster in reservation.left:
        yield _provider_instruction(cluster, reservation)


def clusters_of(reservation: Reservation) -> set[ClusterId]:
    """Returns the clusters that receive changes of this reservation."""
    clusters = {reservation.requester, *reservation.left}
    return clusters if reservation.target is None else clusters | {reservation.target}


def _requester_instruction(reservation: Reservation) -> Instruction:
    amounts = reservation.request.resources.describe()
    if reservation.is_live:
        message = f"Use {reservation.target} for {amounts}"
        return Instruction(Side.REQUESTER, Action.USE, message, reservation)
    action = Action.WAIT if reservation.phase is Phase.PENDING else Action.STOP
    return Instruction(Side.REQUESTER, action, reservation.message, reservation)


def _provider_instruction(cluster: ClusterId, reservation: Reservation) -> Instruction:
    amounts = reservation.request.resources.describe()
    if reservation.is_live and reservation.target == cluster:
        message = f"Hold {amounts} for requester {reservation.requester}"
        return Instruction(Side.PROVIDER, Action.HOLD, message, reservation)
    message = f"Release {amounts} held for requester {reservation.requester}"
    return Instruction(Side.PROVIDER, Action.WITHDRAW, message, reservation)
