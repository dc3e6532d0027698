"""Objects of the published Go broker: what they hold is taken over when a store is created beside them.

They are as ours but without a stored record: a Reservation that the Go broker has decided about has a
phase, one that a user has applied since has none. They are read only while nothing was ever committed, so
exactly once, and the first commit takes them over. What is not certain stops the start before that: nothing
was written then, and the Go broker can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from kubelend.core.durations import MAX_DURATION
from kubelend.core.errors import InvalidInput, StoreFailed
from kubelend.core.events import LeftByAnother
from kubelend.core.lifecycle import LIVE, Phase, Reason
from kubelend.core.models import Advertisement, ClusterId, Reservation, ReservationId
from kubelend.kits import tasks
from kubelend.kube import resources
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes import objects, projection
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import ClusterAdvertisement, StoredRecord
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
