"""Objects that call themselves the broker's, and that the broker knows nothing of: they are deleted.

For both controllers. Somebody may have made one out of a copy, so whoever looks for it is told where it went.
"""

from __future__ import annotations

from kubelend.controllers import happenings
from kubelend.controllers.happenings import Teller
from kubelend.controllers.mirrors import Kind
from kubelend.core.errors import Conflict, NotFound
from kubelend.kube import answers
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource


async def remove(client: Client, resource: Resource[Kind], found: Kind, teller: Teller) -> bool:
    """Delete it as it was seen. False if it is otherwise by now: it may be a ghost no more."""
    known = found.metadata
    only = {"uid": known.uid, "resourceVersion": known.resource_version}
    path = resource.path(known.namespace, known.name)
    try:
        await client.raw("DELETE", path, {"preconditions": only})
    except Conflict:
        return False
    except NotFound as error:
        if not answers.is_missing_object(error):
            raise
        return True
    teller.tell(happenings.at_removal(found))
    return True
