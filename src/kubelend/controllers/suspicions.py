"""Detects drift between an object and its stored record; ignores drift younger than one second, because the
store is usually about to write it.

Repairs are limited: if the object still differs after some attempts, the API server does not accept the
value. Frequent writes by others do not prevent a repair: drift that lasts counts even if the object changes
meanwhile, and a write by others after the broker has given up starts a new count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

from kubelend.controllers.looking import Looks
from kubelend.wire.objects import Object

GRAVE_AFTER: Final = timedelta(seconds=1)
"""Without a change of the object."""
GRAVE_AT_LAST: Final = timedelta(seconds=5)
"""Even if the object changes meanwhile."""
MOST_TRIES: Final = 3


class _Suspicion(NamedTuple):
    version: str
    since: float


class _Tries(NamedTuple):
    what: object
    number: int
    version: str
    """Of the object at the last attempt."""


class Suspicions:
    """Drift of the objects of one kind, by name."""

    def __init__(self, looks: Looks, clock: Callable[[], float] = time.monotonic) -> None:
        self._looks = looks
        self._clock = clock
        self._since: dict[str, _Suspicion] = {}
        self._tries: dict[str, _Tries] = {}

    def is_grave(self, found: Object) -> bool:
        """Whether the drift has lasted; if not, the object is enqueued again."""
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
        """Whether to try a repair; the number of attempts for the same drift is limited."""
        name, version = found.metadata.name, found.metadata.resource_version
        before = self._tries.get(name)
        is_same = before is not None and before.what == what and not _is_touched(before, version)
        count = before.number + 1 if before is not None and is_same else 1
        self._tries[name] = _Tries(what, min(count, MOST_TRIES + 1), version)
        return count <= MOST_TRIES

    def clear(self, found: Object) -> None:
        """The object agrees with its record, or is deleted."""
        self._since.pop(found.metadata.name, None)
        self._tries.pop(found.metadata.name, None)


def _is_touched(before: _Tries, version: str) -> bool:
    """Whether others have written the object since the broker gave up."""
    return before.number > MOST_TRIES and before.version != version
