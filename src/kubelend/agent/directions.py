"""Builds ReservationInstructions from reservations. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from msgspec.structs import replace

from kubelend.wire import bodies, quantities
from kubelend.wire.objects import (
    Metadata,
    ReservationInstruction,
    ReservationInstructionSpec,
    ReservationInstructionStatus,
)

FINISHED: Final = "Finished"


def reservation_instruction(body: bodies.Reservation, namespace: str) -> ReservationInstruction:
    """The object for a live reservation, without a status."""
    amounts = quantities.parse_requested(body.requested_resources, "requestedResources")
    spec = ReservationInstructionSpec(
        *quantities.requested_fields(amounts),
        reservation_name=body.id,
        target_cluster_id=body.target_cluster_id,
        message=f"Use {body.target_cluster_id} for {amounts.describe()}",
        expires_at=body.status.expires_at,
    )
    return ReservationInstruction(Metadata(body.id, namespace), spec)


def delivered_status(
    known: ReservationInstructionStatus, body: bodies.Reservation
) -> ReservationInstructionStatus:
    """The spec is up to date with the broker. The peering's part of the status stays."""
    return replace(known, delivered=True, observed_reservation_resource_version=str(body.revision))


def finished_instruction_status(
    known: ReservationInstructionStatus, body: bodies.Reservation | None, now: datetime
) -> ReservationInstructionStatus:
    """The reservation has finished, or the broker does not know it. `now` is the agent's time, from
    which the retention counts. A status that is finished already stays unchanged.
    """
    if known.finished_at is not None:
        return known
    message = "Reservation not found on the broker" if body is None else body.status.message
    return replace(known, phase=FINISHED, message=message, finished_at=now)
