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

from kubelend.controllers.looking import ReconcileQueue
from kubelend.wire.objects import Object

DRIFT_GRACE: Final = timedelta(seconds=1)
"""Without a change of the object."""
DRIFT_DEADLINE: Final = timedelta(seconds=5)
"""Even if the object changes meanwhile."""
MAX_REPAIRS: Final = 3


class _Drift(NamedTuple):
    version: str
    since: float


class _Repairs(NamedTuple):
    drift: object
    number: int
    version: str
    """Of the object at the last attempt."""


class DriftTracker:
    """Drift of the objects of one kind, by name."""

    def __init__(self, queue: ReconcileQueue, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._clock = clock
        self._since: dict[str, _Drift] = {}
        self._repairs: dict[str, _Repairs] = {}

    def is_persistent(self, found: Object) -> bool:
        """Whether the drift has lasted; if not, the object is enqueued again."""
        name, version, now = found.metadata.name, found.metadata.resource_version, self._clock()
        known = self._since.get(name)
        if known is not None and known.version == version:
            return True
        since = now if known is None else known.since
        is_lasting = now - since >= DRIFT_DEADLINE.total_seconds()
        self._since[name] = _Drift(version, now if is_lasting else since)
        if not is_lasting:
            self._queue.add_after(name, DRIFT_GRACE)
        return is_lasting

    def may_repair(self, found: Object, drift: object) -> bool:
        """Whether to try a repair; the number of attempts for the same drift is limited."""
        name, version = found.metadata.name, found.metadata.resource_version
        before = self._repairs.get(name)
        is_same = (
            before is not None
            and before.drift == drift
            and not _was_written_by_others(before, version)
        )
        count = before.number + 1 if before is not None and is_same else 1
        self._repairs[name] = _Repairs(drift, min(count, MAX_REPAIRS + 1), version)
        return count <= MAX_REPAIRS

    def clear(self, found: Object) -> None:
        """The object agrees with its record, or is deleted."""
        self._since.pop(found.metadata.name, None)
        self._repairs.pop(found.metadata.name, None)


def _was_written_by_others(before: _Repairs, version: str) -> bool:
    """Whether others have written the object since the broker gave up."""
    return before.number > MAX_REPAIRS and before.version != version
