"""Exponential backoff with jitter. Randomness is a parameter, so that tests are deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """`retries` delays, each twice the previous one, up to `longest`."""

    retries: int = 3
    first: timedelta = timedelta(milliseconds=200)
    longest: timedelta = timedelta(seconds=30)

    def delays(self, chance: Callable[[], float] = random.random) -> Iterator[float]:
        """Yield the delays in seconds. `chance` returns numbers from 0 to 1; jitter subtracts up to half of
        each delay.

        Without jitter all clients that a restart disconnected would retry at the same moment.
        """
        delay = self.first
        for _ in range(self.retries):
            yield min(delay, self.longest).total_seconds() * (1 - chance() / 2)
            delay = min(delay * 2, self.longest)


NO_RETRIES = Backoff(retries=0)
"""No retries."""
