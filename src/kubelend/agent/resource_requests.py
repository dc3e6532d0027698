"""Maps a ResourceRequest to a reservation request and its idempotency key, and results to its status. Pure.

A transient error means Pending, never Failed: Failed is only what the broker or the spec itself has
decided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from typing import Final

import msgspec
from msgspec.structs import replace

from kubelend.agent.reservation_cache import LIVE_PHASES
from kubelend.core import durations, resources
from kubelend.core.errors import (
    CertificateRefused,
    Conflict,
    InvalidDuration,
    InvalidInput,
    InvalidQuantity,
    KubelendError,
    UnexpectedResponse,
)
from kubelend.core.lifecycle import Phase, Reason
from kubelend.wire import bodies, validation
from kubelend.wire.objects import (
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
    SentRequest,
)

REQUESTING_REASON: Final = "Asking"
"""The reason while the first response of the broker is outstanding."""
RESERVATION_LOST_REASON: Final = "ReservationLost"
"""The reason when the broker does not know a reservation that it made."""

_TRANSIENT_CLASSES: Final = (KubelendError, Conflict)
"""Exactly these classes are independent of the request: an internal error of the broker, and a
concurrent change."""


def is_transient(error: KubelendError) -> bool:
    """Whether the same call may succeed later without a change of the request.

    A response that is not the broker's comes from an intermediary, and a certificate can be replaced: both
    are no decision about the request.
    """
    return (
        error.retryable
        or isinstance(error, UnexpectedResponse | CertificateRefused)
        or type(error) in _TRANSIENT_CLASSES
    )


def status_for_request(sent: SentRequest) -> ResourceRequestStatus:
    """Written before the broker is called: from here on it may have made a reservation."""
    return ResourceRequestStatus(
        phase="Pending",
        reason=REQUESTING_REASON,
        message="Requesting a reservation from the broker",
        observed_generation=sent.generation,
        sent_request=sent,
    )


def status_for_reservation(
    found: ResourceRequest, body: bodies.Reservation, renewal_error: KubelendError | None = None
) -> ResourceRequestStatus:
    """The state of the reservation; `renewal_error` is why it could not be renewed."""
    notes, is_live = [_reservation_message(body)], body.status.phase in LIVE_PHASES
    is_expired = body.status.phase == Phase.RELEASED and body.status.reason == Reason.EXPIRED
    if renewal_error is not None:
        notes.append(f"renewal failed: {renewal_error}")
    return ResourceRequestStatus(
        phase="Expired" if is_expired else body.status.phase,
        target_cluster_id=body.target_cluster_id,
        reservation_name=body.id,
        reason=renewal_error.code if is_live and renewal_error is not None else body.status.reason,
        message="; ".join(notes),
        expires_at=body.status.expires_at,
        observed_generation=found.metadata.generation,
        sent_request=found.status.sent_request,
    )


def status_for_transient_error(sent: SentRequest, error: KubelendError) -> ResourceRequestStatus:
    """The broker could not be reached, or cannot respond now."""
    return replace(
        status_for_request(sent), reason=error.code, message=f"Not reserved yet: {error}"
    )


def failed_status(generation: int, error: KubelendError) -> ResourceRequestStatus:
    """The spec is invalid, or the broker rejected the request; its message describes what would fit."""
    return ResourceRequestStatus(
        phase="Failed", reason=error.code, message=str(error), observed_generation=generation
    )


def status_for_lost_reservation(found: ResourceRequest) -> ResourceRequestStatus:
    """The broker does not know the reservation: it lost its store, or is another broker."""
    name = found.status.reservation_name
    return ResourceRequestStatus(
        phase="Failed",
        reservation_name=name,
        reason=RESERVATION_LOST_REASON,
        message=f"Reservation {name} not found on the broker",
        observed_generation=found.metadata.generation,
    )


def status_for_pending_release(
    found: ResourceRequest, error: KubelendError
) -> ResourceRequestStatus:
    """The object is being deleted, and stays until the broker has released the reservation."""
    return replace(
        found.status,
        reason=error.code,
        message=f"Deletion waits until the reservation is released: {error}",
    )


def _reservation_message(body: bodies.Reservation) -> str:
    phase, message = body.status.phase, body.status.message
    if phase == Phase.RESERVED:
        message = f"Resources reserved in cluster {body.target_cluster_id}"
    if phase in LIVE_PHASES and body.previous_cluster_ids:
        return f"{message}, moved there from cluster {body.previous_cluster_ids[-1]}"
    until = body.status.wait_until
    if phase == Phase.PENDING and until is not None:
        return f"{message}; queued until {until:%Y-%m-%dT%H:%M:%SZ}"
    return message


REQUEST_FINALIZER: Final = "resourcerequest.rear.fluidos.eu/finalizer"

FINAL_PHASES: Final = frozenset({"Failed", "Released", "Expired"})
"""Phases in which a ResourceRequest neither holds nor waits for resources."""


class RequestState(Enum):
    """The state of an object, derived from the object alone."""

    NEW = "new"  # no reservation requested yet
    REQUESTED = "asking"  # requested, but the response is not recorded
    BOUND = "bound"  # has a reservation
    DONE = "done"  # finished


def request_state(found: ResourceRequest) -> RequestState:
    status = found.status
    if status.phase in FINAL_PHASES:
        return RequestState.DONE
    if status.reservation_name:
        return RequestState.BOUND
    return RequestState.NEW if status.sent_request is None else RequestState.REQUESTED


def request_from_spec(spec: ResourceRequestSpec) -> bodies.ReservationRequest:
    """The reservation request for a spec. `InvalidInput` names the invalid field."""
    for field, name, amount in _quantity_fields(spec):
        _check_amount(field, name, str(amount))
    _check_times(spec)
    body = bodies.copy_fields(spec, bodies.ReservationRequest, requested_resources=spec.amounts)
    try:
        # A request that could not be read back from the status must not be sent.
        return msgspec.json.decode(msgspec.json.encode(body), type=bodies.ReservationRequest)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"spec.{validation.readable_validation_error(error)}") from None


def allowed_namespaces(found: ResourceRequest) -> tuple[str, ...]:
    """Who may create requests in one namespace may not send the pods of another to other clusters."""
    own = found.metadata.namespace
    return (own,) if own in found.spec.namespaces else ()


def check_namespaces(found: ResourceRequest) -> None:
    others = [name for name in found.spec.namespaces if name != found.metadata.namespace]
    if others:
        raise InvalidInput(
            f"spec.namespaces: {others[0]} is not the namespace of this ResourceRequest",
            hint="create a ResourceRequest in that namespace",
        )


def idempotency_key(cluster: str, uid: str, generation: int) -> str:
    """The same for every attempt of one object; a recreated object gets another key. `generation` is that of
    the request that was sent.
    """
    identity = msgspec.json.encode((cluster, uid, generation))
    return f"resourcerequest-{hashlib.sha256(identity).hexdigest()}"


def _quantity_fields(spec: ResourceRequestSpec) -> Iterator[tuple[str, str, str | int]]:
    yield "requestedCPU", "cpu", spec.requested_cpu
    yield "requestedMemory", "memory", spec.requested_memory
    if spec.requested_gpu:
        yield "requestedGPU", "gpu", spec.requested_gpu
    if spec.requested_storage:
        yield "requestedStorage", "storage", spec.requested_storage
    for name, text in spec.extended_resources.items():
        yield f"extendedResources.{name}", name, text


def _check_amount(field: str, name: str, text: str) -> None:
    try:
        amounts = resources.parse_requested({name: text})
    except InvalidInput as error:
        what = error.message.removeprefix(f"{name}: ")
        raise type(error)(f"spec.{field}: {what}", hint=error.hint) from None
    if name in ("cpu", "memory") and not amounts:
        raise InvalidQuantity(
            f"spec.{field}: must be greater than zero",
            hint="use a quantity such as 500m or 256Mi",
        )


def _check_times(spec: ResourceRequestSpec) -> None:
    if spec.duration and _parse_duration_field("duration", spec.duration) <= timedelta():
        raise InvalidDuration(
            f"spec.duration: {spec.duration!r} must be greater than zero",
            hint="use a duration such as 1h30m",
        )
    if spec.wait and _parse_duration_field("wait", spec.wait) < timedelta():
        raise InvalidDuration(
            f"spec.wait: {spec.wait!r} must not be negative", hint="use a duration such as 5m or 0s"
        )


def _parse_duration_field(field: str, text: str) -> timedelta:
    try:
        return durations.parse_duration(text)
    except InvalidDuration as error:
        raise InvalidDuration(f"spec.{field}: {error.message}", hint=error.hint) from None
