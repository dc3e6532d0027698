"""Compares the objects of a cluster namespace with the ledger, and plans the writes. Pure.

Objects that agree with the ledger need no write, so the broker's own writes cause no further ones. What the
broker writes goes into the cache as the API server returned it, so that it never acts on its own changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.broker import instructions, parties
from kubelend.broker.instructions import Action, Instruction, Side
from kubelend.controllers import marks
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.core.models import ClusterId, RequestKey
from kubelend.core.models import Reservation as Record
from kubelend.stores import kube_objects, kube_projection
from kubelend.stores.kube_objects import StoredObject
from kubelend.wire import bodies, mailboxes, quantities
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    ClusterAdvertisement,
    ClusterSession,
    Reservation,
)
from kubelend.wire.objects import (
    AgentRequest,
    BrokerResponse,
    Metadata,
    ProviderInstruction,
    ProviderInstructionSpec,
)

LIVE_PHASES: Final = ("Pending", "Reserved", "Active")
OPEN_ACTIONS: Final = frozenset({Action.USE, Action.WAIT, Action.HOLD})

InstructionObject = Reservation | ProviderInstruction


class WriteInstruction(NamedTuple):
    """Write this instruction into the object, or into a new one."""

    instruction: Instruction
    obj: InstructionObject | None


class DeleteObject(NamedTuple):
    """The ledger no longer has the reservation of this object."""

    obj: InstructionObject


PlannedWrite = WriteInstruction | DeleteObject


def plan_reservation_objects(
    cluster: ClusterId,
    record: Record | None,
    requester_object: Reservation | None,
    provider_object: ProviderInstruction | None,
) -> Iterator[PlannedWrite]:
    """The writes that bring the objects of one reservation into agreement with the ledger."""
    parts = () if record is None else instructions.instructions_for(cluster, record)
    by_side = {part.side: part for part in parts}
    for obj, side in ((requester_object, Side.REQUESTER), (provider_object, Side.PROVIDER)):
        part = by_side.get(side)
        if part is None:
            if (
                obj is not None
                and is_made_by_program(obj)
                and not marks.is_being_deleted(obj.metadata)
            ):
                yield DeleteObject(obj)
        elif obj is None:
            if (
                part.action in OPEN_ACTIONS
            ):  # a reservation that ended before it was shown is not shown
                yield WriteInstruction(part, None)
        elif not is_up_to_date(obj, part):
            yield WriteInstruction(part, obj)


def is_made_by_program(obj: InstructionObject) -> bool:
    """Whether the broker or an agent made it; users delete their own objects."""
    if isinstance(obj, ProviderInstruction):
        return True
    return (
        marks.is_managed(obj.metadata)
        or mailboxes.IDEMPOTENCY_ANNOTATION in obj.metadata.annotations
    )


def is_up_to_date(obj: InstructionObject, part: Instruction) -> bool:
    """Ignores grants: each signature differs, for the same content."""
    response = instruction_of(obj)
    return response is not None and replace(response, grant="") == parties.instruction_body(
        part, ""
    )


def instruction_of(obj: InstructionObject) -> bodies.Instruction | None:
    """The instruction in an object; None if there is none, or it cannot be decoded."""
    try:
        return mailboxes.instruction_from_response(response_of(obj))
    except KubelendError:
        return None


# -- requests


def pending_request(
    obj: InstructionObject | ClusterAdvertisement | ClusterSession,
) -> AgentRequest | None:
    """The pending request of an object; None if it was answered."""
    request = request_of(obj)
    response = response_of(obj) or mailboxes.NO_RESPONSE
    if request is not None:
        return None if request.id == response.request_id else request
    match obj:
        case Reservation():
            if marks.is_managed(obj.metadata):  # it only shows a reservation
                return None
            return AgentRequest("", "reserve") if obj.status.response is None else None
        case ClusterAdvertisement():
            is_new = obj.status.observed_generation != obj.metadata.generation
            return AgentRequest("", "publish") if is_new else None
    return None


def request_of(
    obj: InstructionObject | ClusterAdvertisement | ClusterSession,
) -> AgentRequest | None:
    return obj.status.request if isinstance(obj, ProviderInstruction) else obj.spec.request


def response_of(
    obj: InstructionObject | ClusterAdvertisement | ClusterSession,
) -> BrokerResponse | None:
    return obj.spec.response if isinstance(obj, ProviderInstruction) else obj.status.response


def idempotency_key(obj: Reservation) -> RequestKey:
    """The idempotency key of a request object."""
    given = obj.metadata.annotations.get(mailboxes.IDEMPOTENCY_ANNOTATION)
    return RequestKey(f"namespace/{obj.metadata.uid}" if given is None else given)


def is_object_of(obj: Reservation, record: Record) -> bool:
    """Whether it shows this reservation; if it shows none, whether it is the request for it."""
    response = instruction_of(obj)
    if response is not None:
        return response.reservation.id == record.id
    if marks.is_managed(obj.metadata):
        return obj.metadata.name == mailboxes.reservation_object_name(record.id)
    return idempotency_key(obj) == record.request.key and may_have_decided(obj)


def may_have_decided(obj: Reservation) -> bool:
    """Whether the request may have been executed, although no response says so.

    A broker may stop between commit and response, and a store that fails may have written after all. Any
    other error means that nothing was decided: then the key is that of another reservation.
    """
    if pending_request(obj) is not None:
        return True
    refusal = mailboxes.error_from_response(response_of(obj))
    return refusal is None or isinstance(refusal, Unavailable)


def verb_from_conditions(obj: Reservation) -> str:
    """The verb that the object's conditions ask for; empty if none."""
    response = instruction_of(obj)
    if response is None:
        return ""
    phase = response.reservation.status.phase
    true = {condition.type for condition in obj.status.conditions if condition.status == "True"}
    if "RequesterReleased" in true and phase in LIVE_PHASES:
        return "release"
    return "activate" if "RequesterActive" in true and phase == "Reserved" else ""


def needs_finalizer(obj: Reservation, cluster: ClusterId) -> bool:
    """Whether it could be deleted without a release: the namespace had no cluster label for a while."""
    if marks.has_finalizer(obj.metadata) or marks.is_being_deleted(obj.metadata):
        return False
    response = instruction_of(obj)
    if response is None or response.reservation.requester_id != cluster:
        return False
    return response.reservation.status.phase in LIVE_PHASES


# -- objects and patches


def reservation_object(record: Record, namespace: str, *, in_full: bool = True) -> StoredObject:
    """The object that shows a reservation to its requester, who requested it elsewhere.

    Not of the type that is decoded: a record may have values that the CRD does not accept.
    """
    projection = kube_projection.project(record)
    metadata = Metadata(
        mailboxes.reservation_object_name(record.id),
        namespace,
        finalizers=(RESERVATION_FINALIZER,),
        labels={kube_objects.MANAGED_BY: kube_objects.MANAGED_BY_BROKER},
    )
    return StoredObject(
        metadata, (projection if in_full else kube_projection.minimal(projection)).spec
    )


def reservation_status_patch(
    obj: Reservation | StoredObject, record: Record, response: BrokerResponse, now: datetime
) -> dict[str, object]:
    return {
        **kube_projection.reservation_status(record),
        "observedGeneration": obj.metadata.generation,
        "lastUpdateTime": now,
        "response": mailboxes.response_fields(response),
    }


def error_status_patch(
    obj: Reservation, error: KubelendError, response: BrokerResponse, now: datetime
) -> dict[str, object]:
    """The status of a request that failed or is to be repeated."""
    return {
        "phase": None if error.retryable else "Failed",
        "message": str(error),
        "reason": error.code,
        "observedGeneration": obj.metadata.generation,
        "lastUpdateTime": now,
        "response": mailboxes.response_fields(response),
    }


def provider_instruction_object(
    part: Instruction, response: BrokerResponse, namespace: str
) -> ProviderInstruction:
    record = part.reservation
    return ProviderInstruction(
        Metadata(
            mailboxes.instruction_object_name(record.id),
            namespace,
            labels={kube_objects.MANAGED_BY: kube_objects.MANAGED_BY_BROKER},
        ),
        provider_instruction_spec(part, response),
    )


def provider_instruction_patch(part: Instruction, response: BrokerResponse) -> dict[str, object]:
    """The merge patch of a spec, removing all fields that are not set."""
    spec: dict[str, object] = msgspec.to_builtins(provider_instruction_spec(part, response))
    spec.setdefault("expiresAt", None)
    return spec | {"response": mailboxes.response_fields(response)}


def provider_instruction_spec(
    part: Instruction, response: BrokerResponse
) -> ProviderInstructionSpec:
    record = part.reservation
    return ProviderInstructionSpec(
        *quantities.requested_fields(record.request.resources),
        reservation_name=record.id,
        message=part.message,
        expires_at=record.expires_at,
        requester_cluster_id=record.requester,
        response=response,
    )
