"""Objects of the published Go broker: what they hold is taken over when a store is created beside them.

They are as ours but without a stored record: a Reservation that the Go broker has decided about has a
phase, one that a user has applied since has none. They are read only while nothing was ever committed, so
exactly once, and the first commit takes them over. What is not certain stops the start before that: nothing
was written then, and the Go broker can go on.

`leave` is the way back: the objects become the Go broker's again, which ignores the fields of our CRDs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import msgspec

from kubelend.core.durations import MAX_DURATION
from kubelend.core.errors import InvalidInput, NotFound, StoreFailed
from kubelend.core.events import LeftByAnother
from kubelend.core.lifecycle import LIVE, Phase, Reason
from kubelend.core.models import Advertisement, ClusterId, Reservation, ReservationId
from kubelend.core.resources import NOTHING, Resources
from kubelend.kits import tasks
from kubelend.kube import resources
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes import objects, projection
from kubelend.stores.kubernetes.objects import LEDGER_RECORDS
from kubelend.wire import broker_objects, conversion
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, ClusterAdvertisement, StoredRecord
from kubelend.wire.conversion import RequestLimits

RESERVATIONS: Final = resources.resource_for(broker_objects.Reservation)
ADVERTISEMENTS: Final = resources.resource_for(ClusterAdvertisement)

_UNLIMITED: Final = RequestLimits(MAX_DURATION, MAX_DURATION, MAX_DURATION)
"""A request of the Go broker without a duration was permanent: it gets the longest that Go can express."""
_WITHOUT_RECORD: Final = ("", Phase.PENDING, Phase.FAILED)
"""Not decided yet: a new request. Or rejected, like requests that this broker rejects."""
_PROBE: Final = StoredRecord(0, "probe", "{}")

Found = TypeVar("Found", ClusterAdvertisement, broker_objects.Reservation)
Record = TypeVar("Record", Advertisement, Reservation)


async def read_left(client: Client, namespace: str) -> LeftByAnother:
    """What the Go broker has left; `StoreFailed` names an object that cannot be taken over."""
    offers = await _read(client, namespace, ADVERTISEMENTS, projection.advertisement_from_object)
    held = await _read(client, namespace, RESERVATIONS, reservation_from_object)
    by_age = sorted(offers, key=lambda one: one.sent_at)
    newest = {one.cluster: one for one in by_age}  # a cluster may have two, under different names
    return LeftByAnother(list(newest.values()), sorted(held, key=lambda one: one.created_at))


def reservation_from_object(found: broker_objects.Reservation) -> Reservation:
    """A reservation as the Go broker has left it; `InvalidInput` if what it holds is not certain."""
    metadata, spec, status = found.metadata, found.spec, found.status
    request, phase = projection.request_from_object(found, _UNLIMITED), Phase(status.phase)
    target = ClusterId(status.target_cluster_id or spec.target_cluster_id)
    created_at = metadata.creation_timestamp
    reserved_at = status.reserved_at or created_at
    if reserved_at is None or created_at is None or (phase in LIVE and not target):
        raise InvalidInput(f"it is {phase} without a target cluster or a time")
    if target == request.requester:
        raise InvalidInput(f"cluster {target} is its requester and its provider")
    expires_at = status.expires_at or reserved_at + request.duration
    changed_at = status.last_update_time or reserved_at
    is_expired = changed_at >= expires_at
    reasons = {
        Phase.RESERVED: Reason.LOCKED,
        Phase.ACTIVE: Reason.IN_USE,
        Phase.RELEASED: Reason.EXPIRED if is_expired else Reason.BY_REQUESTER,
    }
    return Reservation(
        ReservationId(metadata.name),
        request,
        created_at,
        phase=phase,
        reason=reasons[phase],
        message=status.message,
        target=target or None,
        reserved_at=reserved_at,
        expires_at=expires_at,
        activated_at=changed_at if phase is Phase.ACTIVE else None,
        finished_at=None if phase in LIVE else changed_at,
    )


async def _read(
    client: Client, namespace: str, resource: Resource[Found], convert: Callable[[Found], Record]
) -> list[Record]:
    listed = await client.list(resource, namespace)
    for one in listed.undecodable:
        raise _cannot_be_taken_over(resource, one.name, one.error)
    decided = [found for found in listed.objects if _is_decided(found)]
    records = []
    for found in decided:
        try:
            records.append(convert(found))
        except (InvalidInput, ValueError) as error:
            raise _cannot_be_taken_over(resource, found.metadata.name, str(error)) from error
    await tasks.gather_limited(partial(_check_writable, client, resource), decided)
    return records


def _is_decided(found: ClusterAdvertisement | broker_objects.Reservation) -> bool:
    """Whether the Go broker has decided about it; to delete a reservation is to release it."""
    metadata = found.metadata
    return found.status.phase not in _WITHOUT_RECORD and metadata.deletion_timestamp is None


async def _check_writable(client: Client, resource: Resource[Found], found: Found) -> None:
    """Whether the API server accepts and keeps a record: the CRDs may still be those of the Go broker."""
    name, namespace = found.metadata.name, found.metadata.namespace
    change = {"status": {"record": _PROBE}}
    try:
        written = await client.patch(
            resource, name, namespace, change, subresource="status", dry_run=True
        )
    except InvalidInput as error:
        raise _cannot_be_taken_over(resource, name, str(error)) from error
    if written.status.record is None:
        raise objects.record_dropped_error(resource.kind)


def _cannot_be_taken_over(resource: Resource[Found], name: str, error: str) -> StoreFailed:
    return StoreFailed(
        f"{resource.kind} {name} of another broker cannot be taken over: {error}",
        hint="correct it, or delete it with its finalizers, which releases it",
    )


# -- the way back

_GO_STATUS: Final = frozenset(
    [
        "phase",
        "message",
        "targetClusterID",
        "reservedAt",
        "expiresAt",
        "lastUpdateTime",
        "active",
        "score",
        "conditions",
    ]
)
_GO_CONDITIONS: Final = ("RequesterActive", "RequesterReleased", "Ready", "Stale", "Overcommitted")
_OWN_LABELS: Final = (objects.MANAGED_BY, objects.ARCHIVED_LABEL, objects.FINISHED_LABEL)


async def leave(client: Client, namespace: str) -> int:
    """Leave all objects to the Go broker; returns how many reservations are live.

    While it runs, and after an interruption, neither broker of ours starts: records without a head are an
    error. So it is repeated until it ends, and skips what it has done.
    """
    await client.delete(LEDGER_RECORDS, objects.HEAD_NAME, namespace)
    for record in (await client.list(LEDGER_RECORDS, namespace)).objects:
        await client.delete(LEDGER_RECORDS, record.metadata.name, namespace)
    own = [found for found in await _list(client, namespace, RESERVATIONS) if _is_own(found)]
    await tasks.gather_limited(partial(_leave_reservation, client), own)
    held = [found for found in await _list(client, namespace, RESERVATIONS) if _is_live(found)]
    reserved: defaultdict[str, Resources] = defaultdict(Resources)
    for one in map(reservation_from_object, held):
        reserved[one.target or ""] += one.request.resources
    offers = [found for found in await _list(client, namespace, ADVERTISEMENTS) if _is_own(found)]
    await tasks.gather_limited(partial(_leave_advertisement, client, reserved), offers)
    return len(held)


async def _leave_reservation(client: Client, found: broker_objects.Reservation) -> None:
    """A live one keeps the finalizer, which has the same name there, so that its deletion releases it."""
    metadata, record = found.metadata, found.status.record
    change: dict[str, object] = {"labels": dict.fromkeys(_OWN_LABELS)}
    if not _is_live(found):
        others = [one for one in metadata.finalizers if one != RESERVATION_FINALIZER]
        change["finalizers"] = others
    await client.patch(RESERVATIONS, metadata.name, metadata.namespace, {"metadata": change})
    status = _go_status(found)
    if record is not None:
        known = projection.decode_record_text("reservation", record.data.encode())
        if known.request.duration == MAX_DURATION:  # it was permanent
            status["expiresAt"] = None
    await _patch_status(client, RESERVATIONS, found, status)


async def _leave_advertisement(
    client: Client, reserved: Mapping[str, Resources], found: ClusterAdvertisement
) -> None:
    """With the sums that the Go broker counts on from."""
    metadata, record = found.metadata, found.status.record
    change: dict[str, object] = {"metadata": {"labels": dict.fromkeys(_OWN_LABELS)}}
    if record is not None:
        known = projection.decode_record_text("cluster", record.data.encode())
        body = conversion.from_cluster(known, reserved.get(known.id, NOTHING))
        change["spec"] = {"resources": body.resources, "timestamp": body.timestamp}
    await client.patch(ADVERTISEMENTS, metadata.name, metadata.namespace, change)
    await _patch_status(client, ADVERTISEMENTS, found, _go_status(found))


def _go_status(found: ClusterAdvertisement | broker_objects.Reservation) -> dict[str, object]:
    """The merge patch that leaves the fields of the published contract; the record goes last."""
    names = (field.encode_name for field in msgspec.structs.fields(found.status))
    status: dict[str, object] = {name: None for name in names if name not in _GO_STATUS}
    kept = [one for one in found.status.conditions if one.type in _GO_CONDITIONS]
    return status | {"conditions": kept or None}


async def _patch_status(
    client: Client, resource: Resource[Found], found: Found, status: dict[str, object]
) -> None:
    name, namespace = found.metadata.name, found.metadata.namespace
    with suppress(NotFound):  # deleted, and its finalizer was the last thing that kept it
        await client.patch(resource, name, namespace, {"status": status}, subresource="status")


async def _list(client: Client, namespace: str, resource: Resource[Found]) -> list[Found]:
    listed = await client.list(resource, namespace)
    for one in listed.undecodable:
        raise StoreFailed(f"{resource.kind} {one.name}: {one.error}", hint="correct or delete it")
    return listed.objects


def _is_own(found: ClusterAdvertisement | broker_objects.Reservation) -> bool:
    return found.status.record is not None or not found.metadata.labels.keys().isdisjoint(
        _OWN_LABELS
    )


def _is_live(found: broker_objects.Reservation) -> bool:
    return found.status.phase in LIVE
