"""What a ResourceRequest's status says: of a reservation, or of an error. Pure; `agent.requesting` writes it.

A fault that may pass is Pending and never Failed: Failed is only what the broker, or the spec itself,
has decided.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from msgspec.structs import replace

from kubelend.agent import wishes
from kubelend.agent.reservations import LIVE
from kubelend.core.errors import (
    Conflict,
    InvalidInput,
    KubelendError,
    LimitExceeded,
    UnexpectedAnswer,
)
from kubelend.core.lifecycle import Phase, Reason
from kubelend.wire import bodies
from kubelend.wire.objects import Asked, ResourceRequest, ResourceRequestStatus

ASKING: Final = "Asking"
"""The reason while the broker's first answer is waited for."""
LOST: Final = "ReservationLost"
"""The reason when the broker does not know a reservation that it once gave."""

_CHANGED: Final = (
    "the spec has changed since, to no effect: delete this object and make it anew for that"
)
_PASSING: Final = (KubelendError, Conflict)
"""What these very classes say is no verdict on a request: a broken broker, and "ask again"."""


def is_passing(error: KubelendError) -> bool:
    """Whether the same call may have another answer later, although nobody changes the request.

    An answer that is none of the broker's comes from something between, which may be gone in a minute.
    """
    return error.retryable or isinstance(error, UnexpectedAnswer) or type(error) in _PASSING


def patience(error: KubelendError) -> timedelta:
    """For how long the other side wants to be left in peace."""
    return timedelta(seconds=error.retry_after if isinstance(error, LimitExceeded) else 0)


def of_question(asked: Asked) -> ResourceRequestStatus:
    """The broker is about to be asked: from here on it may have been."""
    return ResourceRequestStatus(
        phase="Pending",
        reason=ASKING,
        message="Asking the broker",
        observed_generation=asked.generation,
        asked=asked,
    )


def of_reservation(
    found: ResourceRequest, body: bodies.Reservation, trouble: KubelendError | None = None
) -> ResourceRequestStatus:
    """Where it stands by the broker's word; `trouble` is what keeps it, or kept it, from being renewed."""
    notes, is_live = [_text(body)], body.status.phase in LIVE
    if is_live and wishes.is_changed(found):
        notes.append(_CHANGED)
    if trouble is not None:
        notes.append(f"could not be renewed: {trouble}")
    return ResourceRequestStatus(
        phase=_phase(body),
        target_cluster_id=body.target_cluster_id,
        reservation_name=body.id,
        reason=trouble.code if is_live and trouble is not None else body.status.reason,
        message="; ".join(notes),
        expires_at=body.status.expires_at,
        observed_generation=_observed(found, body),
        asked=found.status.asked,
    )


def of_fault(asked: Asked, error: KubelendError) -> ResourceRequestStatus:
    """The broker could not be asked, or would not answer now."""
    return replace(of_question(asked), reason=error.code, message=f"Not reserved yet: {error}")


def of_change(found: ResourceRequest) -> ResourceRequestStatus:
    """It asks for something else now, and nothing is held for it any more."""
    return ResourceRequestStatus(
        phase="Pending",
        reason=ASKING,
        message="The spec has changed: asking the broker anew",
        observed_generation=found.status.observed_generation,
    )


def of_refusal(asked: Asked, error: KubelendError) -> ResourceRequestStatus:
    """The broker said no, in its own words: they say what would fit."""
    return _failed(asked.generation, error)


def of_unreadable(found: ResourceRequest, error: InvalidInput) -> ResourceRequestStatus:
    """Nobody can tell what is asked for."""
    return _failed(found.metadata.generation, error)


def of_loss(found: ResourceRequest) -> ResourceRequestStatus:
    """The broker does not know it: its memory is gone, or this is another broker."""
    name = found.status.reservation_name
    return ResourceRequestStatus(
        phase="Failed",
        reservation_name=name,
        reason=LOST,
        message=f"The broker knows no reservation {name}",
        observed_generation=found.metadata.generation,
    )


def of_parting(found: ResourceRequest, error: KubelendError) -> ResourceRequestStatus:
    """It is to go, and cannot before the broker has heard of it."""
    return replace(
        found.status, reason=error.code, message=f"Waits to be given back before it goes: {error}"
    )


def _phase(body: bodies.Reservation) -> str:
    status = body.status
    is_expired = status.phase == Phase.RELEASED and status.reason == Reason.EXPIRED
    return "Expired" if is_expired else status.phase


def _text(body: bodies.Reservation) -> str:
    phase, message = body.status.phase, body.status.message
    if phase == Phase.RESERVED:
        message = f"Resources reserved in cluster {body.target_cluster_id}"
    if phase in LIVE and body.previous_cluster_ids:
        return f"{message}, moved there from cluster {body.previous_cluster_ids[-1]}"
    until = body.status.wait_until
    if phase == Phase.PENDING and until is not None:
        return f"{message}; waits until {until:%Y-%m-%dT%H:%M:%SZ}"
    return message


def _observed(found: ResourceRequest, body: bodies.Reservation) -> int:
    """A live one has seen every change, and takes none up. One that is over can be asked for anew, by a
    change which it has not seen."""
    asked = found.status.asked
    if asked is None or body.status.phase in LIVE:
        return found.metadata.generation
    return max(asked.generation, found.status.observed_generation)


def _failed(generation: int, error: KubelendError) -> ResourceRequestStatus:
    return ResourceRequestStatus(
        phase="Failed", reason=error.code, message=str(error), observed_generation=generation
    )
