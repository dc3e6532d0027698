"""What a ResourceRequest asks of the broker, under which key, and how far it has come.

Before the broker is asked, the question is written down at the object: with that and the key, which is
made of the object's identity, the very same question can be repeated after any crash. The key makes the
answer the same reservation, so nothing is ever taken twice or lost sight of. All of it is pure;
`agent.requesting` acts on it.
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
"""The phases in which a ResourceRequest holds and waits for nothing."""


class Stage(Enum):
    """How far an object has come, by what is written at it and nothing else."""

    NEW = "new"  # to be asked for
    ASKING = "asking"  # the broker may have been asked, and what it said is not known
    BOUND = "bound"  # has a reservation, as far as is known
    DONE = "done"  # nothing is to do before its spec changes


def stage(found: ResourceRequest) -> Stage:
    status = found.status
    if status.phase in FINAL:
        is_seen = status.observed_generation == found.metadata.generation
        return Stage.DONE if is_seen else Stage.NEW
    if status.reservation_name:
        return Stage.BOUND
    return Stage.NEW if status.asked is None else Stage.ASKING


def request(spec: ResourceRequestSpec) -> bodies.ReservationRequest:
    """The question that a spec means. `InvalidInput` names the field that nobody can read."""
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
    """The same for every try of the same question, and for no other: an object made anew has another."""
    identity = msgspec.json.encode((cluster, uid, generation))
    return f"resourcerequest-{hashlib.sha256(identity).hexdigest()}"


def is_changed(found: ResourceRequest) -> bool:
    """Whether it asks for something else now than what the broker was asked."""
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
            f"spec.{field}: must be more than zero",
            hint="write for example 500m or 256Mi",
        )


def _check_times(spec: ResourceRequestSpec) -> None:
    if spec.duration and _time("duration", spec.duration) <= timedelta():
        raise InvalidDuration(
            f"spec.duration: {spec.duration!r} is not above zero", hint="write for example 1h30m"
        )
    if spec.wait and _time("wait", spec.wait) < timedelta():
        raise InvalidDuration(
            f"spec.wait: {spec.wait!r} is below zero", hint="write for example 5m, or 0s"
        )


def _time(field: str, text: str) -> timedelta:
    try:
        return durations.parse(text)
    except InvalidDuration as problem:
        raise InvalidDuration(f"spec.{field}: {problem.message}", hint=problem.hint) from None


def _within_limits(body: bodies.ReservationRequest) -> bodies.ReservationRequest:
    """What could not be read back from where it is written down must not be asked at all."""
    try:
        return msgspec.json.decode(msgspec.json.encode(body), type=bodies.ReservationRequest)
    except msgspec.ValidationError as problem:
        raise InvalidInput(f"spec.{complaints.readable(problem)}") from None
