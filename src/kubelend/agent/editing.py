"""Changes of local objects that others change too: read, changed, written if nobody was faster, else again.

A user edits a spec, the requester adds its finalizer, the peering adds another: nobody may undo what
another has done in the same moment. `LocalObjects.apply` refuses what was made of an old version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from kubelend.agent.ports import LocalObjects
from kubelend.core.errors import Conflict
from kubelend.wire.objects import Kind

TRIES: Final = 5


async def edit(
    objects: LocalObjects, found: Kind, change: Callable[[Kind], Kind], tries: int = TRIES
) -> Kind | None:
    """Change what the object is now; None if it is gone, or another one has its name."""
    newest = await objects.find(type(found), found.key)
    if newest is None or newest.metadata.uid != found.metadata.uid:
        return None
    try:
        return await objects.apply(change(newest))
    except Conflict:
        if tries <= 1:
            raise
    return await edit(objects, found, change, tries - 1)


async def put(objects: LocalObjects, wanted: Kind, tries: int = TRIES) -> Kind:
    """Have an object with this spec. What others gave it beside the spec stays."""
    found = await objects.find(type(wanted), wanted.key)
    parts: Any = wanted
    try:
        return await objects.apply(wanted if found is None else replace(found, spec=parts.spec))
    except Conflict:
        if tries <= 1:
            raise
    return await put(objects, wanted, tries - 1)
