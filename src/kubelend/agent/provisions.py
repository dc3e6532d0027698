"""ProviderInstructions made of reservations, and holds made of either: what `agent.providing` writes.

All of it is pure: a reservation and a time in, an object or a status out.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from kubelend.core.inventory import Hold
from kubelend.wire import bodies, quantities
from kubelend.wire.objects import (
    Metadata,
    ProviderInstruction,
    ProviderInstructionSpec,
    ProviderInstructionStatus,
)

HELD: Final = "Held"
WITHDRAWN: Final = "Withdrawn"
REFUSED: Final = "Refused"

_SUFFIX: Final = "-provider"


def name_of(reservation: str) -> str:
    return f"{reservation}{_SUFFIX}"


def reservation_of(found: ProviderInstruction) -> str:
    """Empty if its name is none of ours."""
    name = found.metadata.name
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) else ""


def hold_of(reservation: bodies.Reservation) -> Hold:
    """What is to be set aside, and for whom."""
    amounts = quantities.asked(reservation.requested_resources, "requestedResources")
    return Hold(reservation.requester_id, amounts)


def hold_in(found: ProviderInstruction) -> Hold:
    """The same as an object says it; `InvalidInput` if somebody has spoilt that."""
    spec = found.spec
    return Hold(spec.requester_cluster_id, quantities.asked(spec.amounts, "spec"))


def instruction(reservation: bodies.Reservation, namespace: str) -> ProviderInstruction:
    """The object for a reservation, without a status."""
    hold = hold_of(reservation)
    spec = ProviderInstructionSpec(
        *quantities.requested(hold.resources),
        reservation_name=reservation.id,
        requester_cluster_id=hold.requester,
        message=f"Hold {hold.resources.describe()} for requester {hold.requester}",
        expires_at=reservation.status.expires_at,
    )
    return ProviderInstruction(Metadata(name_of(reservation.id), namespace), spec)


def is_finished(found: ProviderInstruction) -> bool:
    """Whether it stands here only for people to look at."""
    return found.status.phase in (WITHDRAWN, REFUSED)


def held(*, is_enforced: bool) -> ProviderInstructionStatus:
    """Either way it counts as promised. Without enforcement nobody has looked whether there is room."""
    message = (
        "Set aside" if is_enforced else "Noted: enforcement is off, there may be no room for it"
    )
    return ProviderInstructionStatus(enforced=is_enforced, phase=HELD, message=message)


def finished(phase: str, message: str, now: datetime) -> ProviderInstructionStatus:
    return ProviderInstructionStatus(phase=phase, message=message, finished_at=now)


def farewell(reservation: bodies.Reservation | None, cluster: str) -> str:
    """Why a cluster need not hold it any longer."""
    if reservation is None:
        return "The broker knows no such reservation"
    if reservation.target_cluster_id != cluster and cluster in reservation.previous_cluster_ids:
        return f"Moved to cluster {reservation.target_cluster_id}"
    return reservation.status.message or f"It is {reservation.status.phase}"
