"""The collector: applies changes of the cluster's nodes and pods to the inventory, one at a time.

The cost of a change does not depend on the size of the cluster. Sums are read from the inventory.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from kubelend.agent.ports import Change, ClusterSource, NodeGone, PodGone, Snapshot
from kubelend.agent.standing import Standing
from kubelend.core.errors import KubelendError
from kubelend.core.inventory import Inventory
from kubelend.core.nodes import Node
from kubelend.core.pods import Pod
from kubelend.kits import tasks
from kubelend.kits.backoff import Backoff

PART: Final = "collector"

LOOK_EVERY: Final = timedelta(seconds=1)
"""How often the source's `problem` is polled."""

REOPENING: Final = Backoff(sys.maxsize, timedelta(seconds=1), timedelta(seconds=30))


class Collector:
    """Use `run` as a root task; `measured` is set after the first snapshot."""

    def __init__(
        self,
        source: ClusterSource,
        inventory: Inventory,
        standing: Standing,
        on_change: Callable[[], None],
    ) -> None:
        self.measured = asyncio.Event()
        self._source = source
        self._inventory = inventory
        self._standing = standing
        self._on_change = on_change
        self._broken = ""
        """Why the stream of changes ended; empty after the next snapshot."""

    async def run(self) -> None:
        """Apply changes and report health. Runs until cancelled."""
        await tasks.run_all({"collect": self._collect(), "check source": self._look()})

    async def _collect(self) -> None:
        """Reopens a source that ends; it starts with a snapshot, so nothing is missed."""
        loop = asyncio.get_running_loop()
        pauses = REOPENING.delays()
        while True:
            opened = loop.time()
            self._broken = await self._end_of_changes()
            self._report()
            if loop.time() - opened > REOPENING.longest.total_seconds():
                pauses = REOPENING.delays()
            await asyncio.sleep(next(pauses))

    async def _end_of_changes(self) -> str:
        """Apply changes until the stream ends; returns why."""
        try:
            async with contextlib.aclosing(self._source.changes()) as changes:
                async for change in changes:
                    self._take(change)
        except KubelendError as problem:
            return str(problem)
        return "the stream of cluster changes ended unexpectedly"

    def _take(self, change: Change) -> None:
        match change:
            case Snapshot(nodes, pods):
                self._inventory.reset(nodes, pods)
                self._seen()
            case Node():
                self._inventory.put_node(change)
            case NodeGone(name):
                self._inventory.drop_node(name)
            case Pod():
                self._inventory.put_pod(change)
            case PodGone(id):
                self._inventory.drop_pod(id)
        self._on_change()

    def _seen(self) -> None:
        self._broken = ""
        self.measured.set()
        self._report()

    async def _look(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(LOOK_EVERY.total_seconds())

    def _report(self) -> None:
        problem = self._source.problem or self._broken
        # Before the first snapshot the component is starting, not healthy.
        if problem or self.measured.is_set():
            self._standing.report(PART, problem)
