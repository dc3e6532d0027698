"""Deletes objects that are labelled as managed by the broker, but have no record in the ledger.

Somebody may have made one from a copy, so an Event says why it was deleted. Only the current ledger can tell
(`Broker.check_fencing`): an older one may lack a record that holds resources.
"""

from __future__ import annotations

from kubelend.controllers import happenings, removals
from kubelend.controllers.happenings import Teller
from kubelend.controllers.mirrors import Kind
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource


async def remove(client: Client, resource: Resource[Kind], found: Kind, teller: Teller) -> bool:
    """Delete the orphan as it was read. False if it has changed since and may be no orphan any more."""
    is_gone = await removals.remove(client, resource, found)
    if is_gone:
        teller.tell(happenings.at_removal(found))
    return is_gone
