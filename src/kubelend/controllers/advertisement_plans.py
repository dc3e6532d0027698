"""Decides what to do about a ClusterAdvertisement object. Pure.

An object that the broker manages only shows a cluster's advertisement. Any other is an advertisement itself,
once for each change. Reserved and available are never read from it, but computed and patched.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import msgspec

from kubelend.controllers import marks, specs
from kubelend.core import models
from kubelend.core.errors import InvalidInput
from kubelend.core.models import ClusterId
from kubelend.stores import kube_objects, kube_projection
from kubelend.wire import conversion, texts
from kubelend.wire.broker_objects import ClusterAdvertisement

REJECTED_PREFIX: Final = "Rejected: "
"""Prefix of the status message of an object whose spec was rejected."""


class Advertise(NamedTuple):
    """The object has a new spec, or one that this broker has not processed yet."""

    advertisement: models.Advertisement


class IgnoreOutdated(NamedTuple):
    """The spec is new, but older than the cluster's latest advertisement."""


class Repair(NamedTuple):
    """The object differs from the record."""


class DeleteOrphan(NamedTuple):
    """It is labelled as managed by the broker, which has no record of it."""


AdvertisementAction: TypeAlias = Advertise | IgnoreOutdated | Repair | DeleteOrphan | None


def advertisement_from_object(found: ClusterAdvertisement) -> models.Advertisement:
    """The advertisement in the spec; `InvalidInput` if it is invalid."""
    spec, made_at = found.spec, found.metadata.creation_timestamp
    sent_at = spec.timestamp or made_at
    if sent_at is None:
        raise InvalidInput("neither spec.timestamp nor metadata.creationTimestamp is set")
    cluster = ClusterId(texts.check_plain(spec.cluster_id, "clusterID"))
    return conversion.to_advertisement(specs.advertisement_from_spec(spec), cluster, sent_at)


def plan_advertisement(
    found: ClusterAdvertisement,
    advertisement: models.Advertisement | None,
    processed: models.Advertisement | None,
    record: models.Cluster | None,
) -> AdvertisementAction:
    """The next action before the status is written; None if there is none.

    `advertisement` is the one in the spec, None if it is rejected; `processed` the last one processed from
    this object, None if unknown.
    """
    if marks.is_being_deleted(found.metadata):
        return None
    if marks.is_managed(found.metadata):
        if record is None:
            return DeleteOrphan()
        return None if _matches_record(found, record) else Repair()
    if advertisement is not None and (
        record is None or _is_unprocessed(found, advertisement, processed, record)
    ):
        return (
            IgnoreOutdated()
            if _is_outdated(advertisement, processed, record)
            else Advertise(advertisement)
        )
    if (
        record is None
        or not is_record_object(found)
        or marks.has_record(found.status.record, record)
    ):
        return None
    return Repair()


def is_record_object(found: ClusterAdvertisement) -> bool:
    """Whether this is the object, by its name, in which the store keeps the cluster's record."""
    return kube_objects.record_object_name("cluster", found.spec.cluster_id) == found.metadata.name


def is_withdrawn(
    deleted: ClusterAdvertisement, processed: models.Advertisement | None, record: models.Cluster
) -> bool:
    """Whether the deleted object was the source of what the ledger holds.

    If the ledger has a newer advertisement from elsewhere, the store creates the object again.
    """
    if marks.is_managed(deleted.metadata):
        return marks.has_record(deleted.status.record, record)
    return record.advertisement == processed


def _is_unprocessed(
    found: ClusterAdvertisement,
    advertisement: models.Advertisement,
    processed: models.Advertisement | None,
    record: models.Cluster,
) -> bool:
    """Whether it is not processed yet. After a restart the status tells."""
    if processed is not None:
        return advertisement != processed
    status = found.status
    was_seen = status.observed_generation == found.metadata.generation
    was_heard = was_seen and not status.message.startswith(REJECTED_PREFIX)
    return not was_heard and advertisement != record.advertisement


def _is_outdated(
    advertisement: models.Advertisement,
    processed: models.Advertisement | None,
    record: models.Cluster | None,
) -> bool:
    """For one object the latest spec counts; among several sources the latest measurement."""
    if record is None or record.advertisement == processed:
        return False
    return advertisement.sent_at < record.advertisement.sent_at


def _matches_record(found: ClusterAdvertisement, record: models.Cluster) -> bool:
    """Compared as the server has it: not every record fits the type that objects are decoded into."""
    wanted = kube_projection.comparable_spec(kube_projection.cluster_spec(record))
    is_said = kube_projection.comparable_spec(msgspec.to_builtins(found.spec)) == wanted
    return is_said and marks.has_record(found.status.record, record)
