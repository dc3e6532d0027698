"""Whether objects can be seen, kind by kind, for `/readyz`: told by those who follow them.

A broker that cannot see what people and agents write serves nobody, and nothing else would tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Final, NamedTuple

INITIAL_LIST: Final = "they are being listed"


class _WatchError(NamedTuple):
    error: str
    since: float


class WatchHealth:
    """Of the kinds that are named at the start nothing has been seen yet."""

    def __init__(
        self,
        kinds: Iterable[str],
        where: str = "",
        grace: timedelta = timedelta(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A problem counts after `grace`, but at once with what has never been seen."""
        self._where = where
        self._grace = grace.total_seconds()
        self._clock = clock
        self._errors = {kind: _WatchError(INITIAL_LIST, float("-inf")) for kind in kinds}

    @property
    def unready(self) -> str | None:
        """What cannot be seen, and why; None if all can be."""
        now = self._clock()
        lasting = [
            (kind, problem.error)
            for kind, problem in self._errors.items()
            if now - problem.since >= self._grace
        ]
        # What waits for the first list has no problem of its own where another kind has one.
        told = [one for one in lasting if one[1] != INITIAL_LIST] or lasting
        return "; ".join(f"cannot see {kind}{self._where}: {why}" for kind, why in told) or None

    def listed(self, kind: str) -> None:
        """It has been seen. Whether it still is, after a problem, the watch that follows tells."""
        if (known := self._errors.get(kind)) is not None and known.error == INITIAL_LIST:
            del self._errors[kind]

    def report(self, kind: str, error: str) -> None:
        """Why this kind cannot be seen now; empty if it can."""
        if not error:
            self._errors.pop(kind, None)
            return
        known = self._errors.get(kind)
        since = self._clock() if known is None else known.since
        self._errors[kind] = _WatchError(error, since)
