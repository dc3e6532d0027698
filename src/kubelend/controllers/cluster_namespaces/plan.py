"""Compares the objects of a cluster namespace with the ledger, and plans the writes. Pure.

Objects that agree with the ledger need no write, so the broker's own writes cause no further ones. What the
broker writes goes into the cache as the API server returned it, so that it never acts on its own changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.broker import authorization, streams
from kubelend.broker.streams import Instruction, InstructionAction, Side
from kubelend.controllers import labels, reservation_plan
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.core.models import ClusterId, RequestKey, ReservationId
from kubelend.core.models import Reservation as Record
from kubelend.kube import resources as kube_resources
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes import projection as kubernetes_projection
from kubelend.stores.kubernetes.objects import StoredObject
from kubelend.wire import bodies, broker_objects, cluster_namespaces, quantities
from kubelend.wire import objects as wire_objects
from kubelend.wire.broker_objects import ClusterAdvertisement, ClusterSession, Reservation
from kubelend.wire.objects import Condition, Metadata, Object, ProviderInstruction

UNFINISHED_PHASES: Final = ("Pending", "Reserved", "Active")
OPEN_ACTIONS: Final = frozenset(
    {InstructionAction.USE, InstructionAction.WAIT, InstructionAction.HOLD}
)

InstructionObject = Reservation | ProviderInstruction
AgentObject = InstructionObject | ClusterAdvertisement | ClusterSession
Fields = dict[str, Any]


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
    shown, wanted = instruction_of(obj), authorization.instruction_body(part, "")
    return shown is not None and replace(shown, grant="") == wanted


def instruction_of(obj: InstructionObject) -> bodies.Instruction | None:
    return obj.status.instruction if isinstance(obj, Reservation) else obj.spec.instruction


# -- what agents and users write


def is_pending(obj: AgentObject) -> bool:
    """Whether the agent has written something that is not processed yet, or could not be so far."""
    if isinstance(obj, ProviderInstruction):
        reported, accepted = obj.status.report_time, obj.spec.accepted
        is_new = reported is not None and reported != obj.spec.observed_report_time
        return is_new or _is_to_be_retried(accepted)
    if labels.is_managed(obj.metadata) and obj.status.observed_generation == 0:
        return False  # the broker creates it, and writes the status in a moment
    is_new = obj.status.observed_generation != obj.metadata.generation
    return is_new or _is_to_be_retried(accepted_of(obj))


def accepted_of(obj: AgentObject) -> Condition | None:
    if isinstance(obj, ProviderInstruction):
        return obj.spec.accepted
    return cluster_namespaces.find_accepted(obj.status.conditions)


def _is_to_be_retried(accepted: Condition | None) -> bool:
    return accepted is not None and accepted.status == "Unknown"


def idempotency_key(obj: Reservation) -> RequestKey:
    given = obj.metadata.annotations.get(cluster_namespaces.IDEMPOTENCY_ANNOTATION)
    return RequestKey(f"namespace/{obj.metadata.uid}" if given is None else given)


def is_object_of(obj: Reservation, record: Record) -> bool:
    """Whether it shows this reservation; if it shows none, whether it is the request for it."""
    shown = instruction_of(obj)
    if shown is not None:
        return shown.reservation.id == record.id
    if labels.is_managed(obj.metadata):
        return obj.metadata.name == cluster_namespaces.reservation_object_name(record.id)
    return idempotency_key(obj) == record.request.key and may_have_decided(obj)


def may_have_decided(obj: Reservation) -> bool:
    """Whether the request may have been executed, although the object does not show it.

    A broker may stop between commit and status, and a store that fails may have written after all. Any
    other error means that nothing was decided: then the key is that of another reservation.
    """
    if obj.status.observed_generation != obj.metadata.generation:
        return True
    error = cluster_namespaces.error_from_condition(accepted_of(obj))
    return error is None or isinstance(error, Unavailable)


def wants_change(obj: Reservation) -> bool:
    """Whether the requester wants a change of a live reservation that the generation does not show."""
    shown = instruction_of(obj)
    if shown is None or shown.reservation.status.phase not in UNFINISHED_PHASES:
        return False
    found, status = shown.reservation, shown.reservation.status
    is_released = any(
        one.type == "RequesterReleased" and one.status == "True" for one in obj.status.conditions
    )
    has_moved = bool(found.previous_cluster_ids)
    return is_released or (
        status.phase == "Reserved"
        and reservation_plan.uses_provider(
            obj, found.target_cluster_id, status.reserved_at, has_moved=has_moved
        )
    )


def hold_report(obj: ProviderInstruction) -> bodies.HoldReport | None:
    """What the provider reports about its hold; None if nothing."""
    held = next((one for one in obj.status.conditions if one.type == "Held"), None)
    if held is None:
        return None
    return bodies.HoldReport(held.status == "True", held.reason, held.message)


def needs_finalizer(obj: Reservation, cluster: ClusterId) -> bool:
    """Whether it could be deleted without a release: the namespace had no cluster label for a while."""
    if labels.has_finalizer(obj.metadata) or labels.is_being_deleted(obj.metadata):
        return False
    shown = instruction_of(obj)
    if shown is None or shown.reservation.requester_id != cluster:
        return False
    return shown.reservation.status.phase in UNFINISHED_PHASES


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


def status_patch(obj: AgentObject | StoredObject, wanted: Fields, now: datetime) -> Fields:
    """The merge patch of a status; empty if nothing differs. A field without a value is not set."""
    shown: Fields = {} if isinstance(obj, StoredObject) else msgspec.to_builtins(obj.status)
    change = kube_resources.merge_patch({name: shown.get(name) for name in wanted}, wanted)
    changed = {name: value for name, value in change.items() if value or shown.get(name)}
    return changed and {**changed, "lastUpdateTime": now}


def observed(obj: AgentObject | StoredObject, error: KubelendError | None, now: datetime) -> Fields:
    """Fields of a status that say that the spec is processed, and whether it is accepted."""
    condition = cluster_namespaces.accepted_condition(error, obj.metadata.generation)
    known = () if isinstance(obj, StoredObject | ProviderInstruction) else obj.status.conditions
    conditions = wire_objects.merge_conditions(known, (condition,), now)
    return {
        "observedGeneration": obj.metadata.generation,
        "conditions": msgspec.to_builtins(conditions),
    }


def error_fields(error: KubelendError) -> Fields:
    """Further fields of the status of a request without a reservation."""
    phase = None if error.retryable else "Failed"
    return {"phase": phase, "message": str(error), "reason": error.code}


def provider_instruction_object(
    part: Instruction, grant: str, namespace: str
) -> ProviderInstruction:
    record = part.reservation
    return ProviderInstruction(
        Metadata(
            cluster_namespaces.instruction_object_name(record.id),
            namespace,
            labels={objects.MANAGED_BY: objects.MANAGED_BY_BROKER},
        ),
        provider_instruction_spec(part, grant),
    )


def provider_instruction_patch(obj: ProviderInstruction, part: Instruction, grant: str) -> Fields:
    """The merge patch of the spec; fields about the provider's own status stay."""
    shown: Fields = msgspec.to_builtins(obj.spec)
    wanted: Fields = msgspec.to_builtins(provider_instruction_spec(part, grant))
    kept = {name: shown[name] for name in _REPORT_FIELDS if name in shown}
    return kube_resources.merge_patch(shown, kept | wanted)


_REPORT_FIELDS: Final = (
    *("observedReportTime", "accepted", "handshakeTime", "peer", "peerHandshakes"),
)


def provider_instruction_spec(
    part: Instruction, grant: str
) -> wire_objects.ProviderInstructionSpec:
    record = part.reservation
    return wire_objects.ProviderInstructionSpec(
        *quantities.requested_fields(record.request.resources),
        reservation_name=record.id,
        message=part.message,
        expires_at=record.expires_at,
        requester_cluster_id=record.requester,
        instruction=authorization.instruction_body(part, grant),
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

    def on_delete(self, deleted: Object) -> None:
        at = deleted.kind, deleted.metadata.name
        known = self._objects.get(at)
        if known is not None and known.metadata.uid == deleted.metadata.uid:
            del self._objects[at]
            self._pending_objects.pop(at, None)
            self._unindex(deleted)
        if (reservation := _reservation_of(deleted)) is not None:
            self._pending_reservations[reservation] = None

    def on_list(self, kind: str, uids: set[str]) -> None:
        """After a list: objects that are not in it are deleted."""
        for found in [one for (one_kind, _), one in self._objects.items() if one_kind == kind]:
            if found.metadata.uid not in uids:
                self.on_delete(found)

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

    def _index(self, found: Object) -> None:
        """An object that is being deleted does not take the place of one that was created since."""
        if isinstance(found, Reservation):
            add = dict.setdefault if labels.is_being_deleted(found.metadata) else dict.__setitem__
            add(self._names_by_key, idempotency_key(found), found.metadata.name)
            if (reservation := _reservation_of(found)) is not None:
                add(self._names_by_reservation, reservation, found.metadata.name)

    def _unindex(self, deleted: Object) -> None:
        if isinstance(deleted, Reservation):
            key, name = idempotency_key(deleted), deleted.metadata.name
            if self._names_by_key.get(key) == name:
                del self._names_by_key[key]
            reservation = _reservation_of(deleted)
            if reservation is not None and self._names_by_reservation.get(reservation) == name:
                del self._names_by_reservation[reservation]


def _reservation_of(found: Object) -> ReservationId | None:
    if not isinstance(found, Reservation | ProviderInstruction):
        return None
    shown = instruction_of(found)
    return None if shown is None else ReservationId(shown.reservation.id)


def _is_newer(found: Object, known: Object) -> bool:
    """Events from before a write may arrive after it. Versions of one object are increasing numbers."""
    new, old = found.metadata.resource_version, known.metadata.resource_version
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old
