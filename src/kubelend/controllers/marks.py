"""Resources, labels and finalizers of the broker's objects, and the rules derived from them alone.

Shared by all controllers: which objects the broker manages, when rejected requests are deleted, whether a
cluster is revoked, and deletion with preconditions. Pure but for the deletion.
"""

from __future__ import annotations

from typing import Final

from kubelend.core import models
from kubelend.core.models import RequestKey
from kubelend.kube import resources
from kubelend.stores import kube_objects, records
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, StoredRecord
from kubelend.wire.objects import Metadata

RESERVATION_RESOURCE: Final = resources.resource_for(broker_objects.Reservation)
ADVERTISEMENT_RESOURCE: Final = resources.resource_for(broker_objects.ClusterAdvertisement)

UNARCHIVED_SELECTOR: Final = f"{kube_objects.ARCHIVED_LABEL}!=true"
"""Selects the reservations that are not archived. Archived ones are not reconciled."""


def is_managed(found: Metadata) -> bool:
    """Whether the broker created the object, as opposed to a user or an agent."""
    return found.labels.get(kube_objects.MANAGED_BY) == kube_objects.MANAGED_BY_BROKER


def is_being_deleted(found: Metadata) -> bool:
    """Whether the object has a deletionTimestamp and waits for its finalizers."""
    return found.deletion_timestamp is not None


def has_finalizer(found: Metadata) -> bool:
    return RESERVATION_FINALIZER in found.finalizers


def request_key(found: Metadata) -> RequestKey:
    """The idempotency key of a request object. Another object of the same name has another key."""
    return kube_objects.request_key_for_uid(found.uid)


def has_record(stored: StoredRecord | None, record: models.Cluster | models.Reservation) -> bool:
    """Whether the object's stored record equals `record`. The signature is checked by the store."""
    if stored is None:
        return False
    _, _, text = records.encode_record(record)
    return stored.data == text.decode()
