"""Deletes an object only if it is unchanged since it was read.

Somebody may have changed it since, or created another one under its name, on purpose.
"""

from __future__ import annotations

from kubelend.controllers.mirrors import CachedKind
from kubelend.core.errors import Conflict, NotFound
from kubelend.kube import answers
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource


async def delete_if_unchanged(
    client: Client, resource: Resource[CachedKind], found: CachedKind
) -> bool:
    """False if the object has changed. One that no longer exists counts as deleted."""
    known = found.metadata
    only = {"uid": known.uid, "resourceVersion": known.resource_version}
    path = resource.path(known.namespace, known.name)
    try:
        await client.raw("DELETE", path, {"preconditions": only})
    except Conflict:
        return False
    except NotFound as error:
        if not answers.is_object_not_found(error):
            raise
    return True
