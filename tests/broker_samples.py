"""Objects of the broker as an API server would return them, made from records, for tests without one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

import make
from kubelend.core import models
from kubelend.core.lifecycle import Phase
from kubelend.stores import batch
from kubelend.stores.kubernetes import objects, projection
from kubelend.wire import bodies
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    AdvertisedResources,
    ClusterAdvertisement,
    ClusterAdvertisementSpec,
    ClusterAdvertisementStatus,
    Reservation,
    ReservationSpec,
    ReservationStatus,
    StoredRecord,
)
from kubelend.wire.objects import Condition, Metadata

MANAGED = {objects.MANAGED_BY: objects.MANAGED_BY_BROKER}
UID = "u-1"


def request_object(
    name: str = "mine", *, cpu: str = "1", labels: Any = None, **spec: Any
) -> Reservation:
    """As a user has applied it."""
    amounts = bodies.Quantities(cpu, "1Gi")
    known = Metadata(name, "hub", UID, 1, "7", make.T0, labels=labels or {})
    return Reservation(known, ReservationSpec(amounts, **spec))


def record(phase: str = "Reserved", **fields: Any) -> models.Reservation:
    """The ledger's record of `request_object()`."""
    asked = make.request(key=objects.request_key_for_uid(UID), requester="hub")
    if phase in {"Reserved", "Active"}:
        times = {"reserved_at": make.T0, "expires_at": make.T0 + make.HOUR}
        fields = {"target": "lender", **times, **fields}
    if phase in {"Released", "Failed"}:
        fields = {"finished_at": make.T0, **fields}
    if phase == "Pending":
        fields = {"wait_until": make.T0 + make.HOUR, **fields}
    return make.reservation("mine", asked, phase=Phase(phase), revision=3, **fields)


def reservation_object(found: models.Reservation, *, is_managed: bool = False) -> Reservation:
    """The object as the store has written it, and the generation noted."""
    spec = projection.reservation_spec(found)
    status = {
        name: value
        for name, value in projection.reservation_status(found).items()
        if value is not None
    }
    made = Reservation(
        Metadata(
            *(found.id, "hub", UID, 2, "9", make.T0),
            finalizers=(RESERVATION_FINALIZER,),
            labels=MANAGED if is_managed else {},
        ),
        msgspec.convert(spec, ReservationSpec),
        msgspec.convert(status, ReservationStatus),
    )
    filled: Reservation = with_status(made, record=stored_record(found), observed_generation=2)
    return filled


def stored_record(found: models.Reservation | models.Cluster) -> StoredRecord:
    kind: objects.RecordKind = "cluster" if isinstance(found, models.Cluster) else "reservation"
    return projection.stored_record(kind, found.id, batch.encode_record(found)[2], 5)


def with_status(found: Any, **fields: Any) -> Any:
    return replace(found, status=replace(found.status, **fields))


def with_metadata(found: Any, **fields: Any) -> Any:
    return replace(found, metadata=replace(found.metadata, **fields))


def with_spec(found: Any, **fields: Any) -> Any:
    return replace(found, spec=replace(found.spec, **fields))


def being_deleted(found: Any) -> Any:
    return with_metadata(found, deletion_timestamp=make.T0)


def condition(type: str, status: str = "True", after: timedelta | None = None) -> Condition:
    at = None if after is None else make.T0 + after
    return Condition(type, status, "Test", last_transition_time=at)


def advertisement(
    cluster: str = "lender", *, cpu: str = "4", name: str = "", labels: Any = None, **spec: Any
) -> ClusterAdvertisement:
    """As a user has applied it."""
    amounts, nothing = bodies.Quantities(cpu, "8Gi"), bodies.Quantities("0", "0")
    resources = AdvertisedResources(amounts, nothing, bodies.Amounts(cpu, "8Gi"), amounts)
    known = Metadata(name or f"{cluster}-adv", "hub", UID, 1, "7", make.T0, labels=labels or {})
    spec = {"timestamp": make.T0, **spec}
    return ClusterAdvertisement(known, ClusterAdvertisementSpec(cluster, resources, **spec))


def advertisement_object(found: models.Cluster, *, is_managed: bool = True) -> ClusterAdvertisement:
    """The object as the store has written it."""
    made = advertisement(found.id, labels=MANAGED if is_managed else {})
    spec = msgspec.convert(projection.cluster_spec(found), ClusterAdvertisementSpec)
    return replace(made, spec=spec, status=ClusterAdvertisementStatus(record=stored_record(found)))
