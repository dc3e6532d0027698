"""Maps a ResourceRequest to a reservation request, its idempotency key, its state and its status. Pure.

The request is written to the object's status before it is sent: with it, and with the key derived from
the object's identity, the same call can be repeated after any crash. The key makes the call idempotent,
so no reservation is made twice or lost. `agent.requester` acts on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from typing import Final

import msgspec

from kubelend.core import durations, resources
from kubelend.core.errors import InvalidDuration, InvalidInput, InvalidQuantity
from kubelend.wire import bodies, complaints
from kubelend.wire.objects import ResourceRequest, ResourceRequestSpec

REQUEST_FINALIZER: Final = "resourcerequest.rear.fluidos.eu/finalizer"

FINAL_PHASES: Final = frozenset({"Failed", "Released", "Expired"})
"""Phases in which a ResourceRequest neither holds nor waits for resources."""


class RequestState(Enum):
    """The state of an object, derived from the object alone."""

    NEW = "new"  # no reservation requested yet
    REQUESTED = "asking"  # requested, but the response is not recorded
    BOUND = "bound"  # has a reservation
    DONE = "done"  # finished until its spec changes


def request_state(found: ResourceRequest) -> RequestState:
    status = found.status
    if status.phase in FINAL_PHASES:
        is_seen = status.observed_generation == found.metadata.generation
        return RequestState.DONE if is_seen else RequestState.NEW
    if status.reservation_name:
        return RequestState.BOUND
    return RequestState.NEW if status.asked is None else RequestState.REQUESTED


def request_from_spec(spec: ResourceRequestSpec) -> bodies.ReservationRequest:
    """The reservation request for a spec. `InvalidInput` names the invalid field."""
    for field, name, text in _quantity_fields(spec):
        _check_amount(field, name, text)
    _check_times(spec)
    body = bodies.ReservationRequest(
        requested_resources=spec.amounts,
        priority=spec.priority,
        duration=spec.duration,
        wait=spec.wait,
        policy=spec.policy,
        weights=spec.weights,
        target_cluster_id=spec.target_cluster_id,
        constraints=spec.constraints,
    )
    return _within_limits(body)


def idempotency_key(cluster: str, uid: str, generation: int) -> str:
    """The same for every attempt of one generation of one object; a recreated object gets another
    key.
    """
    identity = msgspec.json.encode((cluster, uid, generation))
    return f"resourcerequest-{hashlib.sha256(identity).hexdigest()}"


def is_spec_changed(found: ResourceRequest) -> bool:
    """Whether the spec now asks for something else than the request that was sent."""
    asked = found.status.asked
    if asked is None or asked.generation == found.metadata.generation:
        return False
    try:
        return request_from_spec(found.spec) != asked.request
    except InvalidInput:
        return True


def has_request_finalizer(found: ResourceRequest) -> bool:
    return REQUEST_FINALIZER in found.metadata.finalizers


def _quantity_fields(spec: ResourceRequestSpec) -> Iterator[tuple[str, str, str]]:
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
    except InvalidInput as problem:
        what = problem.message.removeprefix(f"{name}: ")
        raise type(problem)(f"spec.{field}: {what}", hint=problem.hint) from None
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
    except InvalidDuration as problem:
        raise InvalidDuration(f"spec.{field}: {problem.message}", hint=problem.hint) from None


def _within_limits(body: bodies.ReservationRequest) -> bodies.ReservationRequest:
    """A request that could not be read back from the status must not be sent."""
    try:
        return msgspec.json.decode(msgspec.json.encode(body), type=bodies.ReservationRequest)
    except msgspec.ValidationError as problem:
        raise InvalidInput(f"spec.{complaints.readable_validation_error(problem)}") from None
