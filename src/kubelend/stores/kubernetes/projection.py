"""Projects records to spec and status of Kubernetes objects, reads specs and stored records. Pure.

Spec and status are informative. The state is the stored record: its JSON text with a checksum.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from kubelend.core import durations, models, prices, resources
from kubelend.core.errors import InvalidInput
from kubelend.core.models import (
    UNCONSTRAINED,
    Cluster,
    ClusterId,
    Constraints,
    HoldReport,
    Reservation,
)
from kubelend.stores import batch
from kubelend.stores.batch import CorruptRecord, Document
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.objects import AnyStoredObject, RecordKind, Spec
from kubelend.wire import bodies, broker_objects, conversion, quantities, validation
from kubelend.wire.broker_objects import (
    AdvertisedResources,
    ClusterAdvertisement,
    ClusterAdvertisementSpec,
    ReservationSpec,
    StoredRecord,
)
from kubelend.wire.conversion import RequestLimits

Status = dict[str, object]
RECORD_DECODERS: Final[dict[RecordKind, msgspec.json.Decoder[Any]]] = {
    "cluster": batch.CLUSTER_DECODER,
    "reservation": batch.RESERVATION_DECODER,
    "member": batch.MEMBER_DECODER,
    "token": batch.TOKEN_DECODER,
    "limits": batch.LIMITS_DECODER,
}


class Projection(NamedTuple):
    """Spec and status of an object; both empty for a LedgerRecord."""

    spec: Spec
    status: Status
    finished_at: datetime | None = None


EMPTY_PROJECTION: Final = Projection({}, {})


def project(record: Cluster | Reservation | Document) -> Projection:
    match record:
        case Cluster():
            return Projection(cluster_spec(record), cluster_status(record))
        case Reservation():
            spec, status = reservation_spec(record), reservation_status(record)
            return Projection(spec, status, record.finished_at)
    return EMPTY_PROJECTION


def minimal(found: Projection) -> Projection:
    """The minimal fields: for a server whose CRDs reject some values."""
    spec = {name: value for name, value in found.spec.items() if name in _MINIMAL_FIELDS}
    for name in ("resources", "requestedResources"):
        if isinstance(amounts := spec.get(name), dict):
            spec[name] = {one: amounts[one] for one in _MINIMAL_AMOUNTS if one in amounts}
    return Projection(spec, {"phase": found.status.get("phase")}, found.finished_at)


def cluster_spec(record: Cluster) -> Spec:
    """Reserved and available are sums that the store does not know: it never overwrites them."""
    body = conversion.from_cluster(record, resources.NOTHING)
    return _builtins(
        bodies.copy_fields(
            body,
            ClusterAdvertisementSpec,
            cluster_id=_display_name(body.cluster_id),
            cluster_name=_display_name(body.cluster_name),
            resources=bodies.copy_fields(body.resources, AdvertisedResources, reserved=None),
            region="",  # one of the labels
        )
    )


def cluster_status(record: Cluster) -> Status:
    """Without what depends on time or on reservations: the controllers write that."""
    return {
        "phase": "Active",
        "active": record.cordon is None,
        "lastUpdateTime": _timestamp(record.received_at),
        "validUntil": _timestamp(record.valid_until),
        "cordonReason": record.cordon,
    }


def reservation_spec(record: Reservation) -> Spec:
    request = record.request
    return _builtins(
        ReservationSpec(
            requested_resources=quantities.to_quantities(request.resources),
            target_cluster_id=_display_name(record.target or request.constraints.pinned or ""),
            duration=durations.format_duration(request.duration),
            priority=request.priority,
            requester_id=_display_name(request.requester),
            wait=durations.format_duration(request.wait) if request.wait else "",
            policy=request.policy,
            weights=request.weights,
            constraints=_constraints(request.constraints),
            failover=request.failover,
        )
    )


def reservation_status(record: Reservation) -> Status:
    """All but the conditions, which the requester sets. None removes a field."""
    begun = record.created_at, record.reserved_at, record.acknowledged_at
    changed_at = max(filter(None, (*begun, record.activated_at, record.finished_at)))
    return {
        "phase": record.phase.value,
        "message": record.message,
        "reason": record.reason.value,
        "targetClusterID": _display_name(record.target) if record.target else None,
        "reservedAt": _timestamp(record.reserved_at),
        "expiresAt": _timestamp(record.expires_at),
        "waitUntil": _timestamp(record.wait_until),
        "acknowledgedAt": _timestamp(record.acknowledged_at),
        "held": _hold_report(record.held),
        "activatedAt": _timestamp(record.activated_at),
        "finishedAt": _timestamp(record.finished_at),
        "lastUpdateTime": _timestamp(changed_at),
    }


def _hold_report(found: HoldReport | None) -> Status | None:
    """With all fields, so that a patch replaces all of the previous one."""
    if found is None:
        return None
    return {"held": found.is_held, "reason": found.reason, "message": found.message}


def request_from_object(found: broker_objects.Reservation, terms: RequestLimits) -> models.Request:
    """The request in the spec; `InvalidInput` if it is invalid."""
    name, spec = found.metadata.name, found.spec
    if objects.record_object_name("reservation", name) != name:
        raise InvalidInput(
            f"the name {name[:40]!r} cannot be used", hint="choose one of at most 240 characters"
        )
    requester = ClusterId(
        validation.check_plain(spec.requester_id, "requesterID") or found.metadata.namespace
    )
    key = objects.request_key_for_uid(found.metadata.uid)
    return conversion.to_request(spec, requester, key, terms)


def advertisement_from_object(found: ClusterAdvertisement) -> models.Advertisement:
    """The advertisement in the spec; `InvalidInput` if it is invalid."""
    spec, made_at = found.spec, found.metadata.creation_timestamp
    sent_at = spec.timestamp or made_at
    if sent_at is None:
        raise InvalidInput("neither spec.timestamp nor metadata.creationTimestamp is set")
    cluster = ClusterId(validation.check_plain(spec.cluster_id, "clusterID"))
    return conversion.to_advertisement(conversion.advertisement_from_spec(spec), cluster, sent_at)


def stored_record(kind: RecordKind, id: str, text: bytes, sequence: int) -> StoredRecord:
    name, document = objects.record_object_name(kind, id), text.decode()
    checksum = objects.record_checksum(kind, name, sequence, document)
    return StoredRecord(sequence, checksum, document)


def verified_record(kind: RecordKind, found: AnyStoredObject) -> Any:
    """The stored record of an object. `CorruptRecord` if it is not what the broker wrote."""
    stored, name = found.record, found.metadata.name
    if stored is None:
        raise CorruptRecord("it has no record")
    record = decode_record_text(kind, stored.data.encode())
    if objects.record_object_name(kind, record.id) != name:
        raise CorruptRecord(f"it has the record of another object, {record.id[:80]!r}")
    if not objects.has_valid_checksum(kind, name, stored):
        raise CorruptRecord("its record does not match its checksum")
    return record


def decode_record_text(kind: RecordKind, text: bytes) -> Any:
    try:
        return RECORD_DECODERS[kind].decode(text)
    except (msgspec.DecodeError, UnicodeError, TypeError) as error:
        raise CorruptRecord(f"its record cannot be decoded: {error}") from error


def comparable_spec(spec: Spec) -> Spec:
    """A spec without the fields that the controllers write."""
    amounts = spec.get("resources")
    if not isinstance(amounts, dict):
        return spec
    own = {name: value for name, value in amounts.items() if name not in _CONTROLLER_FIELDS}
    return {**spec, "resources": own}


_CONTROLLER_FIELDS: Final = ("reserved", "available")
_MINIMAL_FIELDS: Final = (
    *("clusterID", "resources"),
    *("requestedResources", "requesterID", "targetClusterID"),
)
_MINIMAL_AMOUNTS: Final = ("capacity", "allocated", "available", "cpu", "memory")
_MAX_DISPLAY_NAME: Final = 253


def _constraints(known: Constraints) -> bodies.Constraints:
    if known == UNCONSTRAINED:
        return bodies.UNCONSTRAINED
    return replace(
        bodies.UNCONSTRAINED,
        labels=known.labels,
        exclude=list(known.excluded),
        max_price_per_hour="" if known.max_price is None else prices.format_price(known.max_price),
        currency=known.currency,
    )


def _display_name(name: str) -> str:
    """Truncated and printable, as the CRDs require: the record has the full value."""
    return validation.to_single_line(name)[:_MAX_DISPLAY_NAME]


def _builtins(spec: msgspec.Struct) -> Spec:
    return cast(Spec, msgspec.to_builtins(spec))


def _timestamp(at: datetime | None) -> str | None:
    return None if at is None else cast(str, msgspec.to_builtins(at))
