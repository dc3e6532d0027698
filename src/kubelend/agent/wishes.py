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

FINALIZER: Final = "resourcerequest.rear.fluidos.eu/finalizer"

FINAL: Final = frozenset({"Failed", "Released", "Expired"})
"""Phases in which a ResourceRequest neither holds nor waits for resources."""


class Stage(Enum):
    """The state of an object, derived from the object alone."""

    NEW = "new"  # no reservation requested yet
    ASKING = "asking"  # requested, but the response is not recorded
    BOUND = "bound"  # has a reservation
    DONE = "done"  # finished until its spec changes


def stage(found: ResourceRequest) -> Stage:
    status = found.status
    if status.phase in FINAL:
        is_seen = status.observed_generation == found.metadata.generation
        return Stage.DONE if is_seen else Stage.NEW
    if status.reservation_name:
        return Stage.BOUND
    return Stage.NEW if status.asked is None else Stage.ASKING


def request(spec: ResourceRequestSpec) -> bodies.ReservationRequest:
    """The reservation request for a spec. `InvalidInput` names the invalid field."""
    for field, name, text in _amounts(spec):
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


def key(cluster: str, uid: str, generation: int) -> str:
    """The same for every attempt of one generation of one object; a recreated object gets another
    key.
    """
    identity = msgspec.json.encode((cluster, uid, generation))
    return f"resourcerequest-{hashlib.sha256(identity).hexdigest()}"


def is_changed(found: ResourceRequest) -> bool:
    """Whether the spec now asks for something else than the request that was sent."""
    asked = found.status.asked
    if asked is None or asked.generation == found.metadata.generation:
        return False
    try:
        return request(found.spec) != asked.request
    except InvalidInput:
        return True


def has_finalizer(found: ResourceRequest) -> bool:
    return FINALIZER in found.metadata.finalizers


def _amounts(spec: ResourceRequestSpec) -> Iterator[tuple[str, str, str]]:
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
        amounts = resources.asked({name: text})
    except InvalidInput as problem:
        what = problem.message.removeprefix(f"{name}: ")
        raise type(problem)(f"spec.{field}: {what}", hint=problem.hint) from None
    if name in ("cpu", "memory") and not amounts:
        raise InvalidQuantity(
            f"spec.{field}: must be greater than zero",
            hint="use a quantity such as 500m or 256Mi",
        )


def _check_times(spec: ResourceRequestSpec) -> None:
    if spec.duration and _time("duration", spec.duration) <= timedelta():
        raise InvalidDuration(
            f"spec.duration: {spec.duration!r} must be greater than zero",
            hint="use a duration such as 1h30m",
        )
    if spec.wait and _time("wait", spec.wait) < timedelta():
        raise InvalidDuration(
            f"spec.wait: {spec.wait!r} must not be negative", hint="use a duration such as 5m or 0s"
        )


def _time(field: str, text: str) -> timedelta:
    try:
        return durations.parse(text)
    except InvalidDuration as problem:
        raise InvalidDuration(f"spec.{field}: {problem.message}", hint=problem.hint) from None


def _within_limits(body: bodies.ReservationRequest) -> bodies.ReservationRequest:
    """A request that could not be read back from the status must not be sent."""
    try:
        return msgspec.json.decode(msgspec.json.encode(body), type=bodies.ReservationRequest)
    except msgspec.ValidationError as problem:
        raise InvalidInput(f"spec.{complaints.readable(problem)}") from None
