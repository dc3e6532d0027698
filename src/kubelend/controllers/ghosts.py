"""Objects that call themselves the broker's, and that the broker knows nothing of: they are deleted.

For both controllers. Somebody may have made one out of a copy, so whoever looks for it is told where it went.
Only the ledger that is the newest can tell (`Broker.confirm`): what an older one does not know may be held.
"""

from __future__ import annotations

from kubelend.controllers import happenings, removals
from kubelend.controllers.happenings import Teller
from kubelend.controllers.mirrors import Kind
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource


async def remove(client: Client, resource: Resource[Kind], found: Kind, teller: Teller) -> bool:
    """Delete it as it was seen. False if it is otherwise by now: it may be a ghost no more."""
    is_gone = await removals.remove(client, resource, found)
    if is_gone:
        teller.tell(happenings.at_removal(found))
    return is_gone
