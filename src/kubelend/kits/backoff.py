"""How long to wait before trying again: longer each time, and never all clients at the same moment.

The client of the broker retries with it. Chance comes in as a function, so that tests hold it still.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """`retries` pauses, each twice as long as the one before, up to a longest."""

    retries: int = 3
    first: timedelta = timedelta(milliseconds=200)
    longest: timedelta = timedelta(seconds=30)

    def delays(self, chance: Callable[[], float] = random.random) -> Iterator[float]:
        """The pauses in seconds. `chance` gives numbers from 0 to 1, and takes up to half of each away.

        Without it all clients which a restart cut off would come back in step, again and again.
        """
        delay = self.first
        for _ in range(self.retries):
            yield min(delay, self.longest).total_seconds() * (1 - chance() / 2)
            delay = min(delay * 2, self.longest)


NONE = Backoff(retries=0)
"""Once and no more."""
