"""Objects that do not say what their records say: mostly the store is about to write them.

Only one that stays so is looked at closely, so that the work of the store costs no calls here. And one that
is as wrong after it was written as before is not written for ever: the server does not take it.

Somebody who writes an object all the time gains nothing by it: it has been wrong for long enough some day,
and what others have written since the broker gave up is another mistake.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

from kubelend.controllers.looking import Looks
from kubelend.wire.objects import Object

GRAVE_AFTER: Final = timedelta(seconds=1)
"""Without a change."""
GRAVE_AT_LAST: Final = timedelta(seconds=5)
"""Whatever changes meanwhile."""
MOST_TRIES: Final = 3


class _Suspicion(NamedTuple):
    version: str
    since: float


class _Tries(NamedTuple):
    what: object
    number: int
    version: str
    """Of the object when it was last looked at for this."""


class Suspicions:
    """Of one kind of object, by name."""

    def __init__(self, looks: Looks, clock: Callable[[], float] = time.monotonic) -> None:
        self._looks = looks
        self._clock = clock
        self._since: dict[str, _Suspicion] = {}
        self._tries: dict[str, _Tries] = {}

    def is_grave(self, found: Object) -> bool:
        """Whether it has been so for a while; if not, it is looked at again."""
        name, version, now = found.metadata.name, found.metadata.resource_version, self._clock()
        known = self._since.get(name)
        if known is not None and known.version == version:
            return True
        since = now if known is None else known.since
        is_lasting = now - since >= GRAVE_AT_LAST.total_seconds()
        self._since[name] = _Suspicion(version, now if is_lasting else since)
        if not is_lasting:
            self._looks.add_after(name, GRAVE_AFTER)
        return is_lasting

    def may_write(self, found: Object, what: object) -> bool:
        """Whether it is worth a try, of which there are a few for the same mistake."""
        name, version = found.metadata.name, found.metadata.resource_version
        before = self._tries.get(name)
        is_same = before is not None and before.what == what and not _is_touched(before, version)
        count = before.number + 1 if before is not None and is_same else 1
        self._tries[name] = _Tries(what, min(count, MOST_TRIES + 1), version)
        return count <= MOST_TRIES

    def clear(self, found: Object) -> None:
        """It is as it should be, or has gone."""
        self._since.pop(found.metadata.name, None)
        self._tries.pop(found.metadata.name, None)


def _is_touched(before: _Tries, version: str) -> bool:
    """Whether somebody has written it since the broker gave up: it was not the broker."""
    return before.number > MOST_TRIES and before.version != version
