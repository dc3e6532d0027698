"""A simulated cluster as a `ClusterSource`: for the demo, the benchmarks and for trying things out.

Chosen with `--source=simulated`. `SimulatedCluster` has no clock: it is the sequence of events that the
seed determines, the same on every machine. Times are whole microseconds, amounts are integers, and each
part of the spec has its own random numbers, so that changing one part leaves the others as they are.
Only the next event of each kind and the end of each pod are in memory.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from datetime import datetime, timedelta
from typing import Final

import msgspec

from kubelend.agent.ports import Change
from kubelend.sources.descriptions import Description
from kubelend.sources.worlds import World

BATCH: Final = 500
"""Events processed before other tasks get a turn."""

BACKLOG: Final = 10_000
"""Changes buffered per consumer; one that is further behind gets a snapshot."""

LONGEST_SLEEP: Final = 5.0
"""Seconds after which the clock is read again: it may have been set."""

_MICROSECOND: Final = timedelta(microseconds=1)
_NAMES: Final = uuid.UUID("6f0b7d0e-6c1b-4d0e-9d3c-2b1f6f4b8a11")


class SimulatedSource:
    """Its time starts when it is created."""

    problem = ""
    """It cannot fail."""

    def __init__(self, description: Description, clock: Callable[[], datetime]) -> None:
        self.description = description
        self._clock = clock
        self._start = clock()
        self._world = World(description)
        self._listeners: list[_Listener] = []

    async def identity(self) -> str:
        """The spec's ID, or one derived from the whole spec."""
        text = msgspec.json.encode(self.description, order="deterministic").decode()
        return self.description.cluster_id or str(uuid.uuid5(_NAMES, text))

    async def changes(self) -> AsyncGenerator[Change, None]:
        listener = _Listener()
        self._listeners.append(listener)
        try:
            while True:
                is_present = self._catch_up()
                if listener.is_behind and is_present:
                    listener.is_behind = False
                    yield self._world.snapshot()
                while listener.waiting:
                    yield listener.waiting.popleft()
                is_idle = is_present and not listener.is_behind
                await asyncio.sleep(self._until_next() if is_idle else 0)
        finally:
            self._listeners.remove(listener)

    def _catch_up(self) -> bool:
        """Process due events and notify consumers; False if more are due."""
        now = (self._clock() - self._start) // _MICROSECOND
        for _ in range(BATCH):
            due = self._world.next_at
            if due is None or due > now:
                return True
            changes = self._world.step().changes
            for listener in self._listeners:
                listener.put(changes)
        return False

    def _until_next(self) -> float:
        due = self._world.next_at
        if due is None:
            return LONGEST_SLEEP
        at = self._start + timedelta(microseconds=due)
        return min(max((at - self._clock()).total_seconds(), 0), LONGEST_SLEEP)


class _Listener:
    """What one consumer of `changes` has not received yet."""

    def __init__(self) -> None:
        self.waiting: deque[Change] = deque()
        self.is_behind = True
        """Needs a snapshot, as at the beginning."""

    def put(self, changes: list[Change]) -> None:
        if self.is_behind:
            return
        self.waiting.extend(changes)
        if len(self.waiting) > BACKLOG:
            self.waiting.clear()
            self.is_behind = True
