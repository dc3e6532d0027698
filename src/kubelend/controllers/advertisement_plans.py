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

NOT_TAKEN_IN: Final = "Rejected: "
"""Prefix of the status message of an object whose spec was rejected."""


class Advertise(NamedTuple):
    """The object has a new spec, or one that this broker has not processed yet."""

    offer: models.Advertisement


class PassOver(NamedTuple):
    """The spec is new, but older than the cluster's latest advertisement."""


class Rewrite(NamedTuple):
    """The object differs from the record."""


class Delete(NamedTuple):
    """It is labelled as managed by the broker, which has no record of it."""


Action: TypeAlias = Advertise | PassOver | Rewrite | Delete | None


def offer(found: ClusterAdvertisement) -> models.Advertisement:
    """The advertisement in the spec; `InvalidInput` if it is invalid."""
    spec, made_at = found.spec, found.metadata.creation_timestamp
    sent_at = spec.timestamp or made_at
    if sent_at is None:
        raise InvalidInput("neither spec.timestamp nor metadata.creationTimestamp is set")
    cluster = ClusterId(texts.checked(spec.cluster_id, "clusterID"))
    return conversion.to_advertisement(specs.advertisement(spec), cluster, sent_at)


def plan(
    found: ClusterAdvertisement,
    offers: models.Advertisement | None,
    heard: models.Advertisement | None,
    record: models.Cluster | None,
) -> Action:
    """The next action before the status is written; None if there is none.

    `advertisement` is the one in the spec, None if it is rejected; `processed` the last one processed from
    this object, None if unknown.
    """
    if marks.is_leaving(found.metadata):
        return None
    if marks.is_own(found.metadata):
        if record is None:
            return Delete()
        return None if _is_right(found, record) else Rewrite()
    if offers is not None and (record is None or _is_news(found, offers, heard, record)):
        return PassOver() if _is_outdated(offers, heard, record) else Advertise(offers)
    if record is None or not keeps_record(found) or marks.is_kept(found.status.record, record):
        return None
    return Rewrite()


def keeps_record(found: ClusterAdvertisement) -> bool:
    """Whether this is the object, by its name, in which the store keeps the cluster's record."""
    return kube_objects.name_of("cluster", found.spec.cluster_id) == found.metadata.name


def is_withdrawn(
    gone: ClusterAdvertisement, heard: models.Advertisement | None, record: models.Cluster
) -> bool:
    """Whether the deleted object was the source of what the ledger holds.

    If the ledger has a newer advertisement from elsewhere, the store creates the object again.
    """
    if marks.is_own(gone.metadata):
        return marks.is_kept(gone.status.record, record)
    return record.advertisement == heard


def _is_news(
    found: ClusterAdvertisement,
    offers: models.Advertisement,
    heard: models.Advertisement | None,
    record: models.Cluster,
) -> bool:
    """Whether it is not processed yet. After a restart the status tells."""
    if heard is not None:
        return offers != heard
    status = found.status
    was_seen = status.observed_generation == found.metadata.generation
    was_heard = was_seen and not status.message.startswith(NOT_TAKEN_IN)
    return not was_heard and offers != record.advertisement


def _is_outdated(
    offers: models.Advertisement, heard: models.Advertisement | None, record: models.Cluster | None
) -> bool:
    """For one object the latest spec counts; among several sources the latest measurement."""
    if record is None or record.advertisement == heard:
        return False
    return offers.sent_at < record.advertisement.sent_at


def _is_right(found: ClusterAdvertisement, record: models.Cluster) -> bool:
    """Compared as the server has it: not every record fits the type that objects are decoded into."""
    wanted = kube_projection.comparable(kube_projection.cluster_spec(record))
    is_said = kube_projection.comparable(msgspec.to_builtins(found.spec)) == wanted
    return is_said and marks.is_kept(found.status.record, record)
