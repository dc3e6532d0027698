"""The archive in Kubernetes: finished reservations with a label, and the end of those that are too old.

What is too old is told by the head, at once. The objects follow by the hour: each carries the hour in which
it finished, and those of the hours gone by are found by it. Others may write labels as well: what is deleted
has a record that says the same.
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
"""More at a time are not named one by one."""


def begun(at: datetime) -> datetime:
    """The hour that a moment is in."""
    return at.replace(minute=0, second=0, microsecond=0)


async def sweep(sights: Sights, state: State) -> datetime | None:
    """Delete what is older than the archive keeps; gives up to when nothing of it is left."""
    since, until = state.swept_until, state.kept_from and begun(state.kept_from)
    if since is None or until is None or since >= until:
        return since
    listed = await sights.client.list(
        RESERVATIONS, sights.namespace, labels=_selector(since, until)
    )
    old = [found for found in listed.objects if _is_old(found, until, sights.seal_key)]

    async def delete(found: Stored) -> None:
        seen = sights.saw("reservation", found)
        with suppress(Missed):  # somebody else needs it, or has deleted it
            await kube_applying.remove(sights, ("reservation", found.metadata.name), seen)
        sights.forget(("reservation", found.metadata.name))

    await kube_crews.each(delete, old)
    return until


def _is_old(found: Stored, until: datetime, key: str) -> bool:
    try:
        record: Reservation = kube_projection.record_of("reservation", found, key)
    except Damaged:
        return False  # nobody knows what it was
    return record.finished_at is not None and record.finished_at < until


def _selector(since: datetime, until: datetime) -> str:
    count = int((until - since) / HOUR)
    if count > MOST_HOURS:
        return f"{ARCHIVED}=true"
    hours = ",".join(kube_applying.hour_of(since + number * HOUR) for number in range(count))
    return f"{ARCHIVED}=true,{FINISHED} in ({hours})"
