"""When rejected requests are deleted: they are objects without a record, so nothing else removes them. Pure.

They stay as long as a finished reservation does, so that the user can read the reason; the audit log has it
for longer. Applies to the broker's namespace and to cluster namespaces.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from kubelend.controllers import marks
from kubelend.core.lifecycle import Phase
from kubelend.wire.broker_objects import Reservation

MIN_REJECTION_RETENTION: Final = timedelta(minutes=1)
"""A rejection stays readable for at least this long, however short the retention is."""


def rejected_until(found: Reservation, retention: timedelta) -> datetime | None:
    """When a request in the broker's namespace may be deleted; None if it was not rejected.

    An object with a stored record is not concerned: the store archives it.
    """
    status = found.status
    if status.phase != Phase.FAILED or status.record is not None:
        return None
    if marks.is_managed(found.metadata) or marks.is_being_deleted(found.metadata):
        return None
    return _end_of_retention(found, status.finished_at or status.last_update_time, retention)


def rejected_in_cluster_namespace_until(
    found: Reservation, retention: timedelta
) -> datetime | None:
    """The same in a cluster namespace, including a retryable request that was not repeated."""
    response, request = found.status.response, found.spec.request
    if (
        response is None
        or response.body
        or not response.error
        or marks.is_being_deleted(found.metadata)
    ):
        return None
    if request is not None and request.id != response.request_id:
        return None  # it has been repeated
    return _end_of_retention(found, found.status.last_update_time, retention)


def _end_of_retention(
    found: Reservation, since: datetime | None, retention: timedelta
) -> datetime | None:
    since = since or found.metadata.creation_timestamp
    return None if since is None else since + max(retention, MIN_REJECTION_RETENTION)
