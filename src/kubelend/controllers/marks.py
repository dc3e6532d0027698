"""What the broker's objects are known by: their resources, labels, finalizers, and whose record they keep.

Pure. Both kinds of objects, and all that plan and write them here, go by this.
"""

from __future__ import annotations

from typing import Final

from kubelend.core import models
from kubelend.core.models import RequestKey
from kubelend.kube import resources
from kubelend.stores import kube_objects, records
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Kept
from kubelend.wire.objects import Metadata

RESERVATIONS: Final = resources.of(broker_objects.Reservation)
ADVERTISEMENTS: Final = resources.of(broker_objects.ClusterAdvertisement)

UNARCHIVED: Final = f"{kube_objects.ARCHIVED}!=true"
"""Selects the reservations that are not over for long: of the others nothing is expected any more."""


def is_own(found: Metadata) -> bool:
    """Whether the broker made it, and not somebody who wants something by it."""
    return found.labels.get(kube_objects.MADE_BY) == kube_objects.BROKER


def is_leaving(found: Metadata) -> bool:
    """Whether somebody has deleted it, and finalizers hold it."""
    return found.deletion_timestamp is not None


def holds_on(found: Metadata) -> bool:
    return RESERVATION_FINALIZER in found.finalizers


def key_of(found: Metadata) -> RequestKey:
    """Under which the ledger knows a wish. Another object of the same name is another wish."""
    return kube_objects.key_of(found.uid)


def is_kept(kept: Kept | None, record: models.Cluster | models.Reservation) -> bool:
    """Whether an object keeps this very record. Whether the broker has sealed it, the store tells."""
    if kept is None:
        return False
    _, _, text = records.encode(record)
    return kept.data == text.decode()
