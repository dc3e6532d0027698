"""What a ClusterAdvertisement object says to the broker, and what is to be done about it. Pure.

An object that the broker made says nothing: it shows what a cluster has said elsewhere. Any other is the word
of whoever may write it, once for each time that it changes. Reserved and available are never taken from it.
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

NOT_TAKEN_IN: Final = "Not taken in: "
"""How the message begins of an object whose word does not count."""


class Advertise(NamedTuple):
    """The cluster says something new, or the broker has not heard it yet."""

    offer: models.Advertisement


class PassOver(NamedTuple):
    """It says something new that is older than what the cluster has said elsewhere."""


class Rewrite(NamedTuple):
    """The object does not say what the record says."""


class Delete(NamedTuple):
    """It calls itself the broker's, and the broker knows nothing of it."""


Action: TypeAlias = Advertise | PassOver | Rewrite | Delete | None


def offer(found: ClusterAdvertisement) -> models.Advertisement:
    """What it offers; `InvalidInput` says what is wrong with it."""
    spec, made_at = found.spec, found.metadata.creation_timestamp
    sent_at = spec.timestamp or made_at
    if sent_at is None:
        raise InvalidInput("neither a timestamp nor a time of creation is given")
    cluster = ClusterId(texts.checked(spec.cluster_id, "clusterID"))
    return conversion.to_advertisement(specs.advertisement(spec), cluster, sent_at)


def plan(
    found: ClusterAdvertisement,
    offers: models.Advertisement | None,
    heard: models.Advertisement | None,
    record: models.Cluster | None,
) -> Action:
    """The next thing to do before it is shown; None if nothing is.

    `offers` is what it says now, None if that does not count; `heard` what it last said, None if nobody
    remembers.
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
    """Whether it is by its name the one object of its cluster in which the store keeps the record."""
    return kube_objects.name_of("cluster", found.spec.cluster_id) == found.metadata.name


def is_withdrawn(
    gone: ClusterAdvertisement, heard: models.Advertisement | None, record: models.Cluster
) -> bool:
    """Whether what the ledger holds is what this object said, which is there no more.

    Where something newer was said elsewhere, the store makes the object anew.
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
    """Whether it has not been heard yet. Of what was heard before a restart the status tells."""
    if heard is not None:
        return offers != heard
    status = found.status
    was_seen = status.observed_generation == found.metadata.generation
    was_heard = was_seen and not status.message.startswith(NOT_TAKEN_IN)
    return not was_heard and offers != record.advertisement


def _is_outdated(
    offers: models.Advertisement, heard: models.Advertisement | None, record: models.Cluster | None
) -> bool:
    """Of one object the last word counts, of several speakers the one that was measured last."""
    if record is None or record.advertisement == heard:
        return False
    return offers.sent_at < record.advertisement.sent_at


def _is_right(found: ClusterAdvertisement, record: models.Cluster) -> bool:
    """Compared as the server has it: not every record fits the type that objects are read into."""
    wanted = kube_projection.comparable(kube_projection.cluster_spec(record))
    is_said = kube_projection.comparable(msgspec.to_builtins(found.spec)) == wanted
    return is_said and marks.is_kept(found.status.record, record)
