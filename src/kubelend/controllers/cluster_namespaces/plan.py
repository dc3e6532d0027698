"""Compares the objects of a cluster namespace with the ledger, and plans the writes. Pure.

Objects that agree with the ledger need no write, so the broker's own writes cause no further ones. What the
broker writes goes into the cache as the API server returned it, so that it never acts on its own changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.broker import authorization, streams
from kubelend.broker.streams import Instruction, InstructionAction, Side
from kubelend.controllers import labels
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.core.models import ClusterId, RequestKey, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes import projection as kubernetes_projection
from kubelend.stores.kubernetes.objects import StoredObject
from kubelend.wire import bodies, broker_objects, cluster_namespaces, quantities
from kubelend.wire import objects as wire_objects
from kubelend.wire.broker_objects import ClusterAdvertisement, ClusterSession, Reservation
from kubelend.wire.objects import (
    AgentRequest,
    BrokerResponse,
    Metadata,
    Object,
    ProviderInstruction,
)

LIVE_PHASES: Final = ("Pending", "Reserved", "Active")
OPEN_ACTIONS: Final = frozenset(
    {InstructionAction.USE, InstructionAction.WAIT, InstructionAction.HOLD}
)

InstructionObject = Reservation | ProviderInstruction
RequestObject = InstructionObject | ClusterAdvertisement | ClusterSession


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
    parts = () if record is None else streams.instructions_for(cluster, record)
    by_side = {part.side: part for part in parts}
    for obj, side in ((requester_object, Side.REQUESTER), (provider_object, Side.PROVIDER)):
        part = by_side.get(side)
        if part is None:
            if obj is not None and not labels.is_being_deleted(obj.metadata) and is_generated(obj):
                yield DeleteObject(obj)
        elif obj is None:
            # A reservation that ended before it was shown is not shown.
            if part.action in OPEN_ACTIONS:
                yield WriteInstruction(part, None)
        elif not is_up_to_date(obj, part):
            yield WriteInstruction(part, obj)


def is_generated(obj: InstructionObject) -> bool:
    """Whether the broker or an agent made it; users delete their own objects."""
    is_instruction = isinstance(obj, ProviderInstruction)
    annotations = obj.metadata.annotations
    is_requested = cluster_namespaces.IDEMPOTENCY_ANNOTATION in annotations
    return is_instruction or labels.is_managed(obj.metadata) or is_requested


def is_up_to_date(obj: InstructionObject, part: Instruction) -> bool:
    """Ignores grants: each signature differs, for the same content."""
    response, wanted = instruction_of(obj), authorization.instruction_body(part, "")
    return response is not None and replace(response, grant="") == wanted


def instruction_of(obj: InstructionObject) -> bodies.Instruction | None:
    """The instruction in an object; None if there is none, or it cannot be decoded."""
    try:
        return cluster_namespaces.instruction_from_response(response_of(obj))
    except KubelendError:
        return None


# -- requests


def pending_request(obj: RequestObject) -> AgentRequest | None:
    """The pending request of an object; None if it was answered."""
    request = obj.status.request if isinstance(obj, ProviderInstruction) else obj.spec.request
    response = response_of(obj) or cluster_namespaces.NO_RESPONSE
    if request is not None:
        return None if request.id == response.request_id else request
    match obj:
        case Reservation():
            if labels.is_managed(obj.metadata):  # it only shows a reservation
                return None
            return AgentRequest("", "reserve") if obj.status.response is None else None
        case ClusterAdvertisement():
            is_new = obj.status.observed_generation != obj.metadata.generation
            return AgentRequest("", "publish") if is_new else None
    return None


def response_of(obj: RequestObject) -> BrokerResponse | None:
    return obj.spec.response if isinstance(obj, ProviderInstruction) else obj.status.response


def idempotency_key(obj: Reservation) -> RequestKey:
    given = obj.metadata.annotations.get(cluster_namespaces.IDEMPOTENCY_ANNOTATION)
    return RequestKey(f"namespace/{obj.metadata.uid}" if given is None else given)


def is_object_of(obj: Reservation, record: Record) -> bool:
    """Whether it shows this reservation; if it shows none, whether it is the request for it."""
    response = instruction_of(obj)
    if response is not None:
        return response.reservation.id == record.id
    if labels.is_managed(obj.metadata):
        return obj.metadata.name == cluster_namespaces.reservation_object_name(record.id)
    return idempotency_key(obj) == record.request.key and may_have_decided(obj)


def may_have_decided(obj: Reservation) -> bool:
    """Whether the request may have been executed, although there is no response.

    A broker may stop between commit and response, and a store that fails may have written after all. Any
    other error means that nothing was decided: then the key is that of another reservation.
    """
    if pending_request(obj) is not None:
        return True
    refusal = cluster_namespaces.error_from_response(response_of(obj))
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
    if labels.has_finalizer(obj.metadata) or labels.is_being_deleted(obj.metadata):
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
    projection = kubernetes_projection.project(record)
    metadata = Metadata(
        cluster_namespaces.reservation_object_name(record.id),
        namespace,
        finalizers=(broker_objects.RESERVATION_FINALIZER,),
        labels={objects.MANAGED_BY: objects.MANAGED_BY_BROKER},
    )
    return StoredObject(
        metadata, (projection if in_full else kubernetes_projection.minimal(projection)).spec
    )


def reservation_status_patch(
    obj: Reservation | StoredObject, record: Record, response: BrokerResponse, now: datetime
) -> dict[str, object]:
    return {
        **kubernetes_projection.reservation_status(record),
        "observedGeneration": obj.metadata.generation,
        "lastUpdateTime": now,
        "response": cluster_namespaces.response_fields(response),
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
        "response": cluster_namespaces.response_fields(response),
    }


def provider_instruction_object(
    part: Instruction, response: BrokerResponse, namespace: str
) -> ProviderInstruction:
    record = part.reservation
    return ProviderInstruction(
        Metadata(
            cluster_namespaces.instruction_object_name(record.id),
            namespace,
            labels={objects.MANAGED_BY: objects.MANAGED_BY_BROKER},
        ),
        provider_instruction_spec(part, response),
    )


def provider_instruction_patch(part: Instruction, response: BrokerResponse) -> dict[str, object]:
    """The merge patch of a spec, removing all fields that are not set."""
    spec: dict[str, object] = msgspec.to_builtins(provider_instruction_spec(part, response))
    spec.setdefault("expiresAt", None)
    return spec | {"response": cluster_namespaces.response_fields(response)}


def provider_instruction_spec(
    part: Instruction, response: BrokerResponse
) -> wire_objects.ProviderInstructionSpec:
    record = part.reservation
    return wire_objects.ProviderInstructionSpec(
        *quantities.requested_fields(record.request.resources),
        reservation_name=record.id,
        message=part.message,
        expires_at=record.expires_at,
        requester_cluster_id=record.requester,
        response=response,
    )


NAMESPACE_KINDS = (ClusterSession, ClusterAdvertisement, Reservation, ProviderInstruction)


class PendingWork(NamedTuple):
    """Objects with a pending event, and reservations that have changed in the ledger."""

    objects: list[Object]
    reservations: list[ReservationId]


class NamespaceCache:
    """All objects of a namespace, by kind and name."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], Object] = {}
        self._names_by_reservation: dict[ReservationId, str] = {}
        """Names of the objects that show a reservation to its requester, by reservation ID."""
        self._names_by_key: dict[str, str] = {}
        """Names of the objects that request a reservation, by idempotency key."""
        self._pending_objects: dict[tuple[str, str], None] = {}
        self._pending_reservations: dict[ReservationId, None] = {}
        self._unlisted = {kind.kind for kind in NAMESPACE_KINDS}
        """Kinds of which there may be more objects than the watch has reported."""
        self._deleted_uids: set[str] = set()
        """UIDs of objects deleted while lists were pending: a list may still have them."""

    @property
    def session(self) -> ClusterSession | None:
        found = self._objects.get((ClusterSession.kind, cluster_namespaces.SESSION_NAME))
        return found if isinstance(found, ClusterSession) else None

    def all(self) -> list[Object]:
        return list(self._objects.values())

    def handle(self, found: Object) -> bool:
        """Handle an object from a watch or a write; False if it is not newer."""
        at = found.kind, found.metadata.name
        known = self._objects.get(at)
        if known is not None and not _is_newer(found, known):
            return False
        self._objects[at] = found
        self._index(found)
        self._pending_objects[at] = None
        return True

    def awaits_list(self, kind: str) -> bool:
        return kind in self._unlisted

    def add_list(self, kind: str, found: Iterable[Object]) -> None:
        """Handle a list made beside the watch, which may be ahead of it."""
        if kind in self._unlisted:
            for one in found:
                if one.metadata.uid not in self._deleted_uids:
                    self.handle(one)
            self._mark_listed(kind)

    def on_delete(self, deleted: Object) -> None:
        if self._unlisted:
            self._deleted_uids.add(deleted.metadata.uid)
        at = deleted.kind, deleted.metadata.name
        known = self._objects.get(at)
        if known is not None and known.metadata.uid == deleted.metadata.uid:
            del self._objects[at]
            self._pending_objects.pop(at, None)
        if (reservation := _reservation_of(deleted)) is not None:
            self._names_by_reservation.pop(reservation, None)
            self._pending_reservations[reservation] = None
        if isinstance(deleted, Reservation):
            self._names_by_key.pop(idempotency_key(deleted), None)

    def on_list(self, kind: str, uids: set[str]) -> None:
        """After a list: objects that are not in it are deleted."""
        for found in [one for (one_kind, _), one in self._objects.items() if one_kind == kind]:
            if found.metadata.uid not in uids:
                self.on_delete(found)
        self._mark_listed(kind)

    def enqueue_reservation(self, reservation: ReservationId) -> None:
        """The reservation has changed in the ledger."""
        self._pending_reservations[reservation] = None

    def shows(self, reservation: ReservationId) -> bool:
        name = cluster_namespaces.instruction_object_name(reservation)
        return (
            reservation in self._names_by_reservation
            or (ProviderInstruction.kind, name) in self._objects
        )

    def enqueue_all(self) -> None:
        self._pending_objects = dict.fromkeys(self._objects)
        for found in self._objects.values():
            if (reservation := _reservation_of(found)) is not None:
                self._pending_reservations[reservation] = None

    def enqueue_matching(self, is_wanted: Callable[[Object], bool]) -> None:
        """Enqueue these objects, although nothing has changed."""
        wanted = (at for at, found in self._objects.items() if is_wanted(found))
        self._pending_objects.update(dict.fromkeys(wanted))

    def pop_pending(self) -> PendingWork:
        """Returns and clears what is pending; later events are for the next call."""
        pending, reservations = self._pending_objects, self._pending_reservations
        self._pending_objects, self._pending_reservations = {}, {}
        found = [self._objects[at] for at in pending if at in self._objects]
        return PendingWork(found, list(reservations))

    def pop_reservations(self) -> list[ReservationId]:
        reservations, self._pending_reservations = self._pending_reservations, {}
        return list(reservations)

    def requester_object(self, id: ReservationId, record: Record | None) -> Reservation | None:
        """The object that shows a reservation to its requester, or requested it."""
        name = self._names_by_reservation.get(id)
        if name is None and record is not None and record.request.key is not None:
            name = self._name_by_key(record.request.key)
        return self._reservation(name or cluster_namespaces.reservation_object_name(id))

    def has_other_object(self, record: Record, obj: Reservation) -> bool:
        """Whether another object than `obj`, which is not being deleted, stands for the reservation."""
        return any(
            is_object_of(one, record)
            for one in self._objects.values()
            if isinstance(one, Reservation)
            and one.metadata.uid != obj.metadata.uid
            and not labels.is_being_deleted(one.metadata)
        )

    def provider_object(self, id: ReservationId) -> ProviderInstruction | None:
        name = cluster_namespaces.instruction_object_name(id)
        found = self._objects.get((ProviderInstruction.kind, name))
        return found if isinstance(found, ProviderInstruction) else None

    def _name_by_key(self, key: str) -> str | None:
        """Excludes an object that is being deleted: its deletion would release the reservation."""
        found = self._reservation(self._names_by_key.get(key, ""))
        is_usable = found is not None and not labels.is_being_deleted(found.metadata)
        return found.metadata.name if found and is_usable else None

    def _reservation(self, name: str) -> Reservation | None:
        found = self._objects.get((Reservation.kind, name))
        return found if isinstance(found, Reservation) else None

    def _mark_listed(self, kind: str) -> None:
        self._unlisted.discard(kind)
        if not self._unlisted:
            self._deleted_uids.clear()

    def _index(self, found: Object) -> None:
        if isinstance(found, Reservation):
            self._names_by_key[idempotency_key(found)] = found.metadata.name
            if (reservation := _reservation_of(found)) is not None:
                self._names_by_reservation[reservation] = found.metadata.name


def _reservation_of(found: Object) -> ReservationId | None:
    if not isinstance(found, Reservation | ProviderInstruction):
        return None
    response = instruction_of(found)
    return None if response is None else ReservationId(response.reservation.id)


def _is_newer(found: Object, known: Object) -> bool:
    """Events from before a write may arrive after it. Versions of one object are increasing numbers."""
    new, old = found.metadata.resource_version, known.metadata.resource_version
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old
