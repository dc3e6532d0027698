"""Projects records to spec and status of Kubernetes objects, and decodes stored records. Pure.

Spec and status are informative. The state is the stored record: its JSON text with the broker's signature.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from kubelend.core import durations, prices, resources
from kubelend.core.models import UNCONSTRAINED, Cluster, Constraints, Reservation
from kubelend.stores import kube_objects, kube_seals, records
from kubelend.stores.batches import Document
from kubelend.stores.kube_objects import RecordKind, Seen, Spec
from kubelend.stores.records import Damaged
from kubelend.wire import bodies, conversion, quantities, texts
from kubelend.wire.broker_objects import (
    AdvertisedResources,
    ClusterAdvertisementSpec,
    Kept,
    ReservationSpec,
)

Status = dict[str, object]
DECODERS: Final[dict[RecordKind, msgspec.json.Decoder[Any]]] = {
    "cluster": records.CLUSTERS,
    "reservation": records.RESERVATIONS,
    "member": records.MEMBERS,
    "token": records.TOKENS,
    "limits": records.LIMITS,
}


class Shown(NamedTuple):
    """Spec and status of an object; both empty for a LedgerRecord."""

    spec: Spec
    status: Status
    finished_at: datetime | None = None


NOTHING: Final = Shown({}, {})


def shown(record: Cluster | Reservation | Document) -> Shown:
    match record:
        case Cluster():
            return Shown(cluster_spec(record), cluster_status(record))
        case Reservation():
            return Shown(reservation_spec(record), reservation_status(record), record.finished_at)
    return NOTHING


def plain(found: Shown) -> Shown:
    """The minimal fields: for a server whose CRDs reject some values."""
    spec = {name: value for name, value in found.spec.items() if name in _LEAST}
    for name in ("resources", "requestedResources"):
        if isinstance(amounts := spec.get(name), dict):
            spec[name] = _least_amounts(amounts)
    return Shown(spec, {"phase": found.status.get("phase")}, found.finished_at)


def cluster_spec(record: Cluster) -> Spec:
    """Reserved and available are sums that the store does not know: it never overwrites them."""
    body, known = conversion.from_cluster(record, resources.NOTHING), record.advertisement
    return _builtins(
        ClusterAdvertisementSpec(
            cluster_id=_fitting(body.cluster_id),
            resources=AdvertisedResources(
                capacity=quantities.of(known.capacity),
                allocatable=quantities.of(known.allocatable),
                allocated=quantities.of(known.allocated),
                available=quantities.of(record.ceiling.clamped()),
            ),
            cluster_name=_fitting(body.cluster_name),
            cost=body.cost,
            timestamp=body.timestamp,
            endpoint_url=body.endpoint_url,
            labels=body.labels,
            valid_for=body.valid_for,
            policy=body.policy,
        )
    )


def cluster_status(record: Cluster) -> Status:
    """Without what depends on time or on reservations: the controllers write that."""
    return {
        "phase": "Active",
        "active": record.cordon is None,
        "lastUpdateTime": _text(record.received_at),
        "validUntil": _text(record.valid_until),
        "cordonReason": record.cordon,
    }


def reservation_spec(record: Reservation) -> Spec:
    request = record.request
    return _builtins(
        ReservationSpec(
            requested_resources=quantities.of(request.resources),
            target_cluster_id=_fitting(record.target or request.constraints.pinned or ""),
            duration=durations.text(request.duration),
            priority=request.priority,
            requester_id=_fitting(request.requester),
            wait=durations.text(request.wait) if request.wait else "",
            policy=request.policy,
            weights=request.weights,
            constraints=_constraints(request.constraints),
        )
    )


def reservation_status(record: Reservation) -> Status:
    """All but the conditions, which the requester sets. None removes a field."""
    return {
        "phase": record.phase.value,
        "message": record.message,
        "reason": record.reason.value,
        "targetClusterID": _fitting(record.target) if record.target else None,
        "reservedAt": _text(record.reserved_at),
        "expiresAt": _text(record.expires_at),
        "waitUntil": _text(record.wait_until),
        "acknowledgedAt": _text(record.acknowledged_at),
        "activatedAt": _text(record.activated_at),
        "finishedAt": _text(record.finished_at),
        "lastUpdateTime": _text(max(filter(None, _times(record)))),
    }


def kept(key: str, kind: RecordKind, id: str, text: bytes, sequence: int) -> Kept:
    name, words = kube_objects.name_of(kind, id), text.decode()
    return Kept(sequence, kube_seals.seal(key, kind, name, sequence, words), words)


def record_of(kind: RecordKind, found: Seen, key: str) -> Any:
    """The stored record of an object. `CorruptRecord` if it is not what the broker wrote."""
    stored, name = found.record, found.metadata.name
    if stored is None:
        raise Damaged("it has no record")
    record = read(kind, stored.data.encode())
    if kube_objects.name_of(kind, record.id) != name:
        raise Damaged(f"it has the record of another object, {record.id[:80]!r}")
    if not kube_seals.is_whole(key, kind, name, stored):
        raise Damaged("its record was not written by the broker, or was modified since")
    return record


def read(kind: RecordKind, text: bytes) -> Any:
    try:
        return DECODERS[kind].decode(text)
    except (msgspec.DecodeError, UnicodeError, TypeError) as error:
        raise Damaged(f"its record cannot be decoded: {error}") from error


def comparable(spec: Spec) -> Spec:
    """A spec without the fields that the controllers write."""
    amounts = spec.get("resources")
    if not isinstance(amounts, dict):
        return spec
    own = {name: value for name, value in amounts.items() if name not in _OF_CONTROLLERS}
    return {**spec, "resources": own}


_OF_CONTROLLERS: Final = ("reserved", "available")
_LEAST: Final = ("clusterID", "resources", "requestedResources", "requesterID", "targetClusterID")
_LEAST_AMOUNTS: Final = ("capacity", "allocated", "available", "cpu", "memory")
_LONGEST_NAME: Final = 253


def _constraints(known: Constraints) -> bodies.ConstraintsBody:
    if known == UNCONSTRAINED:
        return bodies.UNCONSTRAINED
    return replace(
        bodies.UNCONSTRAINED,
        labels=known.labels,
        exclude=list(known.excluded),
        max_price_per_hour="" if known.max_price is None else prices.text(known.max_price),
        currency=known.currency,
    )


def _least_amounts(amounts: dict[str, object]) -> dict[str, object]:
    return {name: amounts[name] for name in _LEAST_AMOUNTS if name in amounts}


def _fitting(name: str) -> str:
    """Truncated and printable, as the CRDs require: the record has the full value."""
    return texts.in_one_line(name)[:_LONGEST_NAME]


def _times(record: Reservation) -> tuple[datetime | None, ...]:
    """When it was created and its status changed."""
    begun = record.created_at, record.reserved_at, record.acknowledged_at
    return *begun, record.activated_at, record.finished_at


def _builtins(spec: msgspec.Struct) -> Spec:
    return cast(Spec, msgspec.to_builtins(spec))


def _text(at: datetime | None) -> str | None:
    return None if at is None else cast(str, msgspec.to_builtins(at))
