"""Objects that do not say what their records say: mostly the store is about to write them.

Only one that stays so is looked at closely, so that the work of the store costs no calls here. And one that
is as wrong after it was written as before is not written for ever: the server does not take it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from kubelend.controllers.looking import Looks
from kubelend.wire.objects import Object

GRAVE_AFTER: Final = timedelta(seconds=1)
MOST_TRIES: Final = 3


class Suspicions:
    """Of one kind of object, by name."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._since: dict[str, str] = {}
        self._tries: dict[str, tuple[object, int]] = {}

    def is_grave(self, found: Object) -> bool:
        """Whether it has been so for a while; if not, it is looked at again."""
        name, version = found.metadata.name, found.metadata.resource_version
        if self._since.get(name) == version:
            return True
        self._since[name] = version
        self._looks.add_after(name, GRAVE_AFTER)
        return False

    def may_write(self, found: Object, what: object) -> bool:
        """Whether it is worth a try, of which there are a few for the same mistake."""
        before, count = self._tries.get(found.metadata.name, (what, 0))
        count = count + 1 if before == what else 1
        self._tries[found.metadata.name] = what, count
        return count <= MOST_TRIES

    def clear(self, found: Object) -> None:
        """It is as it should be, or has gone."""
        self._since.pop(found.metadata.name, None)
        self._tries.pop(found.metadata.name, None)
