"""What each side of a reservation has to do: derived from it, never stored beside it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId, Reservation


class Side(StrEnum):
    """Which side of a reservation a cluster is on."""

    REQUESTER = "requester"
    PROVIDER = "provider"


class Action(StrEnum):
    """What to do. The values are API."""

    WAIT = "Wait"  # requester: nothing is placed yet
    USE = "Use"  # requester: this cluster serves you
    STOP = "Stop"  # requester: it is over
    HOLD = "Hold"  # provider: set this much aside
    WITHDRAW = "Withdraw"  # provider: it is no longer yours to serve


class Instruction(msgspec.Struct, frozen=True):
    """One side's part in one reservation."""

    side: Side
    action: Action
    message: str
    reservation: Reservation


def for_cluster(cluster: ClusterId, reservation: Reservation) -> Iterator[Instruction]:
    """All that a reservation means for a cluster; nothing if it is not concerned."""
    if cluster == reservation.requester:
        yield _for_requester(reservation)
    if cluster == reservation.target or cluster in reservation.left:
        yield _for_provider(cluster, reservation)


def concerned(reservation: Reservation) -> set[ClusterId]:
    """Everyone who has to hear of a change."""
    clusters = {reservation.requester, *reservation.left}
    return clusters if reservation.target is None else clusters | {reservation.target}


def _for_requester(reservation: Reservation) -> Instruction:
    amounts = reservation.request.resources.describe()
    if reservation.is_live:
        message = f"Use {reservation.target} for {amounts}"
        return Instruction(Side.REQUESTER, Action.USE, message, reservation)
    action = Action.WAIT if reservation.phase is Phase.PENDING else Action.STOP
    return Instruction(Side.REQUESTER, action, reservation.message, reservation)


def _for_provider(cluster: ClusterId, reservation: Reservation) -> Instruction:
    amounts = reservation.request.resources.describe()
    if reservation.is_live and reservation.target == cluster:
        message = f"Hold {amounts} for requester {reservation.requester}"
        return Instruction(Side.PROVIDER, Action.HOLD, message, reservation)
    message = f"Release {amounts} held for requester {reservation.requester}"
    return Instruction(Side.PROVIDER, Action.WITHDRAW, message, reservation)
