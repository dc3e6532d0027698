"""Labels, finalizers and deletion of the broker's objects, also in cluster namespaces.

Rejected requests are objects without a record, so nothing else deletes them. They stay as long as a finished
reservation does, so that the user can read the reason; the audit log has it for longer.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from kubelend.core import models
from kubelend.core.errors import Conflict, NotFound, Revoked
from kubelend.core.indexes import MemberIndex
from kubelend.core.lifecycle import Phase, Role
from kubelend.core.members import MembershipStatus, member_id
from kubelend.core.models import ClusterId
from kubelend.kube import codec, resources
from kubelend.kube.client import Client
from kubelend.kube.informer import CachedKind
from kubelend.kube.resources import Resource
from kubelend.stores import batch
from kubelend.stores.kubernetes import objects, projection
from kubelend.stores.kubernetes.objects import RecordKind
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation, StoredRecord
from kubelend.wire.objects import Metadata

MIN_REJECTION_RETENTION: Final = timedelta(minutes=1)
"""A rejection stays readable for at least this long, however short the retention is."""


def rejected_until(found: Reservation, retention: timedelta) -> datetime | None:
    """When a request may be deleted; None if it was not rejected.

    An object with a stored record is not concerned: the store archives it. In a cluster namespace one that
    was accepted shows an instruction.
    """
    status = found.status
    if status.phase != Phase.FAILED or status.record is not None or status.instruction is not None:
        return None
    if is_managed(found.metadata) or is_being_deleted(found.metadata):
        return None
    since = status.finished_at or status.last_update_time or found.metadata.creation_timestamp
    return None if since is None else since + max(retention, MIN_REJECTION_RETENTION)


async def delete_if_unchanged(
    client: Client, resource: Resource[CachedKind], found: CachedKind
) -> bool:
    """False if the object has changed. One that no longer exists counts as deleted."""
    known = found.metadata
    only = {"uid": known.uid, "resourceVersion": known.resource_version}
    path = resource.path(known.namespace, known.name)
    try:
        await client.raw("DELETE", path, {"preconditions": only})
    except Conflict:
        return False
    except NotFound as error:
        if not codec.is_object_not_found(error):
            raise
    return True


RESERVATION_RESOURCE: Final = resources.resource_for(broker_objects.Reservation)
ADVERTISEMENT_RESOURCE: Final = resources.resource_for(broker_objects.ClusterAdvertisement)

REVIEW_RESOURCE: Final = resources.resource_for(broker_objects.PlacementReview)

UNARCHIVED_SELECTOR: Final = f"{objects.ARCHIVED_LABEL}!=true"
"""Selects the reservations that are not archived. Archived ones are not reconciled."""


def is_managed(found: Metadata) -> bool:
    """Whether the broker created the object, as opposed to a user or an agent."""
    return found.labels.get(objects.MANAGED_BY) == objects.MANAGED_BY_BROKER


def is_being_deleted(found: Metadata) -> bool:
    """Whether the object has a deletionTimestamp and waits for its finalizers."""
    return found.deletion_timestamp is not None


def has_finalizer(found: Metadata) -> bool:
    return RESERVATION_FINALIZER in found.finalizers


def has_record(stored: StoredRecord | None, record: models.Cluster | models.Reservation) -> bool:
    """Whether the object's stored record equals `record`, with a valid checksum."""
    if stored is None:
        return False
    kind: RecordKind = "cluster" if isinstance(record, models.Cluster) else "reservation"
    _, _, text = batch.encode_record(record)
    return stored == projection.stored_record(kind, record.id, text, stored.revision)


def check_not_revoked(members: MemberIndex, cluster: ClusterId) -> None:
    """`Revoked` if an administrator has revoked the cluster."""
    member = members.members.get(member_id(Role.CLUSTER, cluster))
    if member is not None and member.status is MembershipStatus.REVOKED:
        raise Revoked(
            f"cluster {cluster} was revoked: {member.reason or 'no reason given'}",
            hint="ask an administrator",
        )
