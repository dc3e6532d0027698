"""Builds ProviderInstructions from reservations, and holds from either. Pure."""

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

_NAME_SUFFIX: Final = "-provider"


def provider_instruction_name(reservation: str) -> str:
    return f"{reservation}{_NAME_SUFFIX}"


def reservation_of_instruction(found: ProviderInstruction) -> str:
    """Empty if the name is not one that the agent gives."""
    name = found.metadata.name
    return name.removesuffix(_NAME_SUFFIX) if name.endswith(_NAME_SUFFIX) else ""


def hold_from_reservation(reservation: bodies.Reservation) -> Hold:
    """What to hold, and for which requester."""
    amounts = quantities.parse_requested(reservation.requested_resources, "requestedResources")
    return Hold(reservation.requester_id, amounts)


def hold_from_instruction(found: ProviderInstruction) -> Hold:
    """The hold that an object describes; `InvalidInput` if its spec was edited to something invalid."""
    spec = found.spec
    return Hold(spec.requester_cluster_id, quantities.parse_requested(spec.amounts, "spec"))


def provider_instruction(reservation: bodies.Reservation, namespace: str) -> ProviderInstruction:
    """The object for a reservation, without a status."""
    hold = hold_from_reservation(reservation)
    spec = ProviderInstructionSpec(
        *quantities.requested_fields(hold.resources),
        reservation_name=reservation.id,
        requester_cluster_id=hold.requester,
        message=f"Hold {hold.resources.describe()} for requester {hold.requester}",
        expires_at=reservation.status.expires_at,
    )
    return ProviderInstruction(Metadata(provider_instruction_name(reservation.id), namespace), spec)


def is_instruction_finished(found: ProviderInstruction) -> bool:
    """Whether the object is only kept for people to read."""
    return found.status.phase in (WITHDRAWN, REFUSED)


def held_status(*, is_enforced: bool) -> ProviderInstructionStatus:
    """Counts as held either way. Without enforcement nobody has checked the capacity."""
    message = (
        "Resources held" if is_enforced else "Recorded without a capacity check: enforcement is off"
    )
    return ProviderInstructionStatus(enforced=is_enforced, phase=HELD, message=message)


def finished_status(phase: str, message: str, now: datetime) -> ProviderInstructionStatus:
    return ProviderInstructionStatus(phase=phase, message=message, finished_at=now)


def withdrawal_reason(reservation: bodies.Reservation | None, cluster: str) -> str:
    """Why a cluster no longer holds a reservation."""
    if reservation is None:
        return "Reservation not found on the broker"
    if reservation.target_cluster_id != cluster and cluster in reservation.previous_cluster_ids:
        return f"Moved to cluster {reservation.target_cluster_id}"
    return reservation.status.message or f"Reservation is {reservation.status.phase}"
