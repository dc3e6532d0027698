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
from kubelend.stores.kube_head import State
from kubelend.stores.kube_objects import ARCHIVED, FINISHED, RESERVATIONS, Stored
from kubelend.stores.kube_sights import Missed, Sights
from kubelend.stores.records import Damaged

HOUR: Final = timedelta(hours=1)
MOST_HOURS: Final = 48
"""Above this many hours the selector does not list them."""


def begun(at: datetime) -> datetime:
    """The start of the hour of a timestamp."""
    return at.replace(minute=0, second=0, microsecond=0)


async def sweep(sights: Sights, state: State) -> datetime | None:
    """Delete expired archived objects; returns up to when nothing is left."""
    since, until = state.swept_until, state.kept_from and begun(state.kept_from)
    if since is None or until is None or since >= until:
        return since
    listed = await sights.client.list(
        RESERVATIONS, sights.namespace, labels=_selector(since, until)
    )
    old = [found for found in listed.objects if _is_old(found, until, sights.seal_key)]

    async def delete(found: Stored) -> None:
        cached = sights.saw("reservation", found)
        with suppress(Missed):  # changed or deleted by others
            await kube_applying.remove(sights, ("reservation", found.metadata.name), cached)
        sights.forget(("reservation", found.metadata.name))

    await kube_crews.each(delete, old)
    return until


def _is_old(found: Stored, until: datetime, key: str) -> bool:
    try:
        record: Reservation = kube_projection.record_of("reservation", found, key)
    except Damaged:
        return False  # its finish time is unknown
    return record.finished_at is not None and record.finished_at < until


def _selector(since: datetime, until: datetime) -> str:
    count = int((until - since) / HOUR)
    if count > MOST_HOURS:
        return f"{ARCHIVED}=true"
    hours = ",".join(kube_applying.hour_of(since + number * HOUR) for number in range(count))
    return f"{ARCHIVED}=true,{FINISHED} in ({hours})"
