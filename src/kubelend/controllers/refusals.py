"""Wishes that were refused: objects without a record, which nothing but time would ever take away. Pure.

They stay for as long as a reservation that is over stays at hand, so that whoever made them can read why;
the journal tells it for longer. Both the broker's own namespace and mailboxes go by this.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from kubelend.controllers import marks
from kubelend.core.lifecycle import Phase
from kubelend.wire.broker_objects import Reservation

LEAST: Final = timedelta(minutes=1)
"""For which a refusal can be read, however short the retention is."""


def due(found: Reservation, retention: timedelta) -> datetime | None:
    """When a wish in the broker's namespace may go; None if it was not refused.

    What has or had a record keeps it: the archive is the store's.
    """
    status = found.status
    if status.phase != Phase.FAILED or status.record is not None:
        return None
    if marks.is_own(found.metadata) or marks.is_leaving(found.metadata):
        return None
    return _after(found, status.finished_at or status.last_update_time, retention)


def due_in_mailbox(found: Reservation, retention: timedelta) -> datetime | None:
    """The same for a question in a mailbox, also for one that might have been asked again, and was not."""
    said, question = found.status.response, found.spec.request
    if said is None or said.body or not said.error or marks.is_leaving(found.metadata):
        return None
    if question is not None and question.id != said.request_id:
        return None  # it has been asked again
    return _after(found, found.status.last_update_time, retention)


def _after(found: Reservation, since: datetime | None, retention: timedelta) -> datetime | None:
    since = since or found.metadata.creation_timestamp
    return None if since is None else since + max(retention, LEAST)
