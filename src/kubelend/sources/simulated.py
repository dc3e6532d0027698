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
from kubelend.sources.descriptions import SimulationSpec
from kubelend.sources.worlds import SimulatedCluster

MAX_EVENTS_PER_TURN: Final = 500
"""Events processed before other tasks get a turn."""

MAX_BACKLOG: Final = 10_000
"""Changes buffered per consumer; one that is further behind gets a snapshot."""

MAX_SLEEP_SECONDS: Final = 5.0
"""Seconds after which the clock is read again: it may have been set."""

_MICROSECOND: Final = timedelta(microseconds=1)
_ID_NAMESPACE: Final = uuid.UUID("6f0b7d0e-6c1b-4d0e-9d3c-2b1f6f4b8a11")


class SimulatedSource:
    """Its time starts when it is created."""

    problem = ""
    """It cannot fail."""

    def __init__(self, spec: SimulationSpec, clock: Callable[[], datetime]) -> None:
        self.spec = spec
        self._clock = clock
        self._start = clock()
        self._cluster = SimulatedCluster(spec)
        self._consumers: list[_Consumer] = []

    async def identity(self) -> str:
        """The spec's ID, or one derived from the whole spec."""
        text = msgspec.json.encode(self.spec, order="deterministic").decode()
        return self.spec.cluster_id or str(uuid.uuid5(_ID_NAMESPACE, text))

    async def changes(self) -> AsyncGenerator[Change, None]:
        listener = _Consumer()
        self._consumers.append(listener)
        try:
            while True:
                is_present = self._catch_up()
                if listener.is_behind and is_present:
                    listener.is_behind = False
                    yield self._cluster.snapshot()
                while listener.pending:
                    yield listener.pending.popleft()
                is_idle = is_present and not listener.is_behind
                await asyncio.sleep(self._until_next() if is_idle else 0)
        finally:
            self._consumers.remove(listener)

    def _catch_up(self) -> bool:
        """Process due events and notify consumers; False if more are due."""
        now = (self._clock() - self._start) // _MICROSECOND
        for _ in range(MAX_EVENTS_PER_TURN):
            due = self._cluster.next_at
            if due is None or due > now:
                return True
            changes = self._cluster.step().changes
            for listener in self._consumers:
                listener.put(changes)
        return False

    def _until_next(self) -> float:
        due = self._cluster.next_at
        if due is None:
            return MAX_SLEEP_SECONDS
        at = self._start + timedelta(microseconds=due)
        return min(max((at - self._clock()).total_seconds(), 0), MAX_SLEEP_SECONDS)


class _Consumer:
    """What one consumer of `changes` has not received yet."""

    def __init__(self) -> None:
        self.pending: deque[Change] = deque()
        self.is_behind = True
        """Needs a snapshot, as at the beginning."""

    def put(self, changes: list[Change]) -> None:
        if self.is_behind:
            return
        self.pending.extend(changes)
        if len(self.pending) > MAX_BACKLOG:
            self.pending.clear()
            self.is_behind = True
