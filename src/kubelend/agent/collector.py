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

from kubelend.agent.health import ComponentHealth
from kubelend.agent.ports import ClusterChange, ClusterSource, NodeDeleted, PodDeleted, Snapshot
from kubelend.core.errors import KubelendError
from kubelend.core.inventory import Inventory
from kubelend.core.pod_requests import Node, Pod
from kubelend.kits import tasks
from kubelend.kits.backoff import Backoff

COMPONENT: Final = "collector"

SOURCE_CHECK_INTERVAL: Final = timedelta(seconds=1)
"""How often the source's `problem` is polled."""

REOPEN_BACKOFF: Final = Backoff(sys.maxsize, timedelta(seconds=1), timedelta(seconds=30))


class Collector:
    """Use `run` as a root task; `measured` is set after the first snapshot."""

    def __init__(
        self,
        source: ClusterSource,
        inventory: Inventory,
        health: ComponentHealth,
        on_change: Callable[[], None],
    ) -> None:
        self.measured = asyncio.Event()
        self._source = source
        self._inventory = inventory
        self._health = health
        self._on_change = on_change
        self._stream_error = ""
        """Why the stream of changes ended; empty after the next snapshot."""

    async def run(self) -> None:
        """Apply changes and report health. Runs until cancelled."""
        await tasks.run_all({"collect": self._collect(), "check source": self._check_source()})

    async def _collect(self) -> None:
        """Reopens a source that ends; it starts with a snapshot, so nothing is missed."""
        loop = asyncio.get_running_loop()
        pauses = REOPEN_BACKOFF.delays()
        while True:
            opened = loop.time()
            self._stream_error = await self._apply_changes()
            self._set_health()
            if loop.time() - opened > REOPEN_BACKOFF.longest.total_seconds():
                pauses = REOPEN_BACKOFF.delays()
            await asyncio.sleep(next(pauses))

    async def _apply_changes(self) -> str:
        """Apply changes until the stream ends; returns why."""
        try:
            async with contextlib.aclosing(self._source.changes()) as changes:
                async for change in changes:
                    self._apply(change)
        except KubelendError as error:
            return str(error)
        return "the stream of cluster changes ended unexpectedly"

    def _apply(self, change: ClusterChange) -> None:
        match change:
            case Snapshot(nodes, pods):
                self._inventory.reset(nodes, pods)
                self._stream_error = ""
                self.measured.set()
                self._set_health()
            case Node():
                self._inventory.put_node(change)
            case NodeDeleted(name):
                self._inventory.delete_node(name)
            case Pod():
                self._inventory.put_pod(change)
            case PodDeleted(id):
                self._inventory.delete_pod(id)
        self._on_change()

    async def _check_source(self) -> None:
        while True:
            self._set_health()
            await asyncio.sleep(SOURCE_CHECK_INTERVAL.total_seconds())

    def _set_health(self) -> None:
        problem = self._source.problem or self._stream_error
        # Before the first snapshot the component is starting, not healthy.
        if problem or self.measured.is_set():
            self._health.report(COMPONENT, problem)
