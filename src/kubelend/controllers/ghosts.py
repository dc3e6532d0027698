"""Deletes objects that are labelled as managed by the broker, but have no record in the ledger.

Somebody may have made one from a copy, so an Event says why it was deleted. Only the current ledger can tell
(`Broker.check_fencing`): an older one may lack a record that holds resources.
"""

from __future__ import annotations

from kubelend.controllers import happenings, removals
from kubelend.controllers.happenings import EventRecorder
from kubelend.controllers.mirrors import CachedKind
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource


async def delete_orphan(
    client: Client, resource: Resource[CachedKind], found: CachedKind, recorder: EventRecorder
) -> bool:
    """Delete the orphan as it was read. False if it has changed since and may be no orphan any more."""
    is_gone = await removals.delete_if_unchanged(client, resource, found)
    if is_gone:
        recorder.emit(happenings.orphan_deleted_event(found))
    return is_gone
