"""The archive in Kubernetes: finished reservations with a label, deleted after the retention.

The head's retention limit takes effect at once. Objects are deleted by the hour: each has a label with the
hour in which it finished. Others may write labels as well, so an object is deleted only if its record agrees.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from kubelend.core.models import Reservation
from kubelend.stores import kube_applying, kube_crews, kube_projection
from kubelend.stores.kube_head import HeadState
from kubelend.stores.kube_objects import (
    ARCHIVED_LABEL,
    FINISHED_LABEL,
    STORED_RESERVATIONS,
    StoredObject,
)
from kubelend.stores.kube_sights import ObjectCache, StaleWrite
from kubelend.stores.records import CorruptRecord

ONE_HOUR: Final = timedelta(hours=1)
MAX_SELECTED_HOURS: Final = 48
"""Above this many hours the selector does not list them."""


def start_of_hour(at: datetime) -> datetime:
    """The start of the hour of a timestamp."""
    return at.replace(minute=0, second=0, microsecond=0)


async def sweep_archive(cache: ObjectCache, state: HeadState) -> datetime | None:
    """Delete expired archived objects; returns up to when nothing is left."""
    since, until = state.swept_until, state.kept_from and start_of_hour(state.kept_from)
    if since is None or until is None or since >= until:
        return since
    listed = await cache.client.list(
        STORED_RESERVATIONS, cache.namespace, labels=_archive_selector(since, until)
    )
    old = [found for found in listed.objects if _is_expired(found, until, cache.signature_key)]

    async def delete(found: StoredObject) -> None:
        cached = cache.put("reservation", found)
        with suppress(StaleWrite):  # changed or deleted by others
            await kube_applying.delete_object(cache, ("reservation", found.metadata.name), cached)
        cache.forget(("reservation", found.metadata.name))

    await kube_crews.gather_limited(delete, old)
    return until


def _is_expired(found: StoredObject, until: datetime, key: str) -> bool:
    try:
        record: Reservation = kube_projection.verified_record("reservation", found, key)
    except CorruptRecord:
        return False  # its finish time is unknown
    return record.finished_at is not None and record.finished_at < until


def _archive_selector(since: datetime, until: datetime) -> str:
    count = int((until - since) / ONE_HOUR)
    if count > MAX_SELECTED_HOURS:
        return f"{ARCHIVED_LABEL}=true"
    hours = ",".join(kube_applying.hour_label(since + number * ONE_HOUR) for number in range(count))
    return f"{ARCHIVED_LABEL}=true,{FINISHED_LABEL} in ({hours})"
